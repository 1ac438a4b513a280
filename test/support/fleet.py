"""Prefill and decode servers made of rank processes, and requests between them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from engine_release import SINCE_0_5_20

from pd_harness import forks
from pd_harness.cluster import CHECKOUT, PD_ENV, interpreter
from pd_harness.cpu_host import ENVIRONMENT
from pd_harness.cpu_host.memfabric import MEMFABRIC_VARIABLE as MEMFABRIC
from pd_harness.cpu_host.memfabric import chosen_memfabric
from pd_harness.device import device, wait_for_memfabric_peers
from pd_harness.polling import wait_until
from pd_harness.ports import HOST, free_ports

HERE = Path(__file__).resolve().parent
RANK = "rank_0_5_23.py" if SINCE_0_5_20 else "rank_0_5_9.py"
# Per machine. MemFabric rejects higher device numbers, and senders to such a device hang.
MAX_DEVICES = 16
NIXL_PATH_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH")  # where a process finds NIXL
CPU_HOST = {**ENVIRONMENT, "SGLANG_HOST_IP": HOST}


@dataclass(frozen=True)
class Side:
    """One server: how it splits the model, and what differs from the fleet's defaults."""

    tp: int = 1
    pp: int = 1
    draft_layers: int = 0
    page_size: int = 0  # 0: the fleet's
    model_layers: int = 0  # 0: the fleet's
    k_width: int = 0  # 0: the fleet's
    kv_heads: int = 0  # 0: the fleet's
    dtype: str = "int64"
    fia: bool | None = None  # None: the fleet's
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True)
class Fleet:
    """A prefill and a decode server. Widths are elements per head (MLA: per token)."""

    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)
    backend: str = "nixl"
    kv_heads: int = 4
    draft_heads: int = 4
    window_heads: int = 0  # swa: KV heads of layers with a window; 0: kv_heads
    layers: int = 2
    stages: tuple[int, ...] = ()  # layers of each prefill stage; empty: as even as possible
    hidden_size: int = 64  # of metadata's hidden states on a side with a draft; else 16
    page_size: int = 16
    pages: int = 12
    k_width: int = 4
    v_width: int = 2
    mla: bool = False
    index_keys: bool = False  # MLA with an indexer: keys are state, page size 64; ascend: KV
    hybrid: str = ""  # GQA: every other layer has a window (swa) or is recurrent (mamba, conv)
    nixl_threads: int = 2  # per prefill rank; the engine's 8 take 0.3 s of a core
    fia: bool = False  # ascend: a layer's buffer is viewed as tokens instead of pages

    def stage_sizes(self, pp: int) -> list[int]:
        if pp == len(self.stages):
            return list(self.stages)
        return [len(part) for part in np.array_split(range(self.layers), pp)]

    @property
    def size(self) -> int:
        """Number of ranks on both sides."""
        return self.prefill.ranks + self.decode.ranks

    def ranks(
        self, role: str, bootstrap_port: int, store_port: int, memfabric: str = ""
    ) -> list[dict]:
        """Returns each rank's configuration for `rank_base.RankBase`, each on its own NPU.

        Args:
            role: `prefill` or `decode`.
            memfabric: Release of MemFabric; empty for the default.
        """
        side: Side = getattr(self, role)
        sizes = self.stage_sizes(side.pp)
        if side.model_layers:
            sizes = [side.model_layers]
        starts = np.cumsum([0, *sizes]).tolist()
        drafts = {one: getattr(self, one).draft_layers > 0 for one in ("prefill", "decode")}
        stages_ports = free_ports(side.tp) if side.pp > 1 else [0] * side.tp
        first = 0 if role == "prefill" else self.prefill.ranks
        common = {
            key: value
            for key, value in asdict(self).items()
            if key not in ("prefill", "decode", "layers", "stages")
        }
        return [
            {
                **common,
                "role": role,
                "bootstrap_port": bootstrap_port,
                "store": store_url(store_port),
                "device": device(),
                "gpu_id": (first + pp_rank * side.tp + tp_rank) % MAX_DEVICES,
                "tp_rank": tp_rank,
                "tp_size": side.tp,
                "pp_rank": pp_rank,
                "pp_size": side.pp,
                "stages_port": stages_ports[tp_rank],
                "prefill_pp_size": self.prefill.pp,
                "decode_tp_size": self.decode.tp,
                "layers": sizes[pp_rank],
                "start_layer": starts[pp_rank],
                "model_layers": side.model_layers or self.layers,
                "speculates": drafts[role],
                "sends_hidden_states": drafts["prefill"] == drafts["decode"],
                "draft_layers": side.draft_layers if pp_rank == side.pp - 1 else 0,
                "page_size": side.page_size or self.page_size,
                "k_width": side.k_width or self.k_width,
                "kv_heads": side.kv_heads or self.kv_heads,
                "dtype": side.dtype,
                "fia": self.fia if side.fia is None else side.fia,
                "environment": {MEMFABRIC: memfabric, **side.environment},
            }
            for tp_rank in range(side.tp)
            for pp_rank in range(side.pp)
        ]

    def arriving_layers(self, layers: range) -> list[list]:
        """Returns [is draft, layer] of all that prefill sends to a rank with these layers."""
        drafts = min(self.prefill.draft_layers, self.decode.draft_layers)
        return [[False, n] for n in layers] + [[True, n] for n in range(drafts)]


def store_url(port: int) -> str:
    """Returns the URL of the store in which MemFabric's engines find each other."""
    return f"tcp://{HOST}:{port}"


def is_listening(port: int) -> bool:
    """Returns whether a process listens on this port."""
    with socket.socket() as sock:
        return sock.connect_ex((HOST, port)) == 0


@functools.cache
def nixl_environment(version: str) -> dict[str, str]:
    """Returns the variables with which a process uses this NIXL release.

    Installs the release (190 MB) if necessary.

    Raises:
        RuntimeError: It cannot be installed; the text says why.
    """
    install_library("nixl", version)
    nixl = PD_ENV / "nixl" / version
    first = dict(zip(NIXL_PATH_VARIABLES, (nixl, nixl / "no_cuda")))
    return {
        name: os.pathsep.join(filter(None, [str(folder), os.environ.get(name)]))
        for name, folder in first.items()
    }


@functools.cache
def install_library(library: str, version: str) -> None:
    """Installs this release of `nixl` or `memfabric` (5 MB) if necessary.

    Raises:
        RuntimeError: It cannot be installed; the text says why.
    """
    setup = [str(CHECKOUT / "scripts" / "setup.sh"), f"--{library}", version]
    done = subprocess.run(setup, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{library} {version} cannot be installed:\n{done.stderr[-2000:]}")


@functools.cache
def missing_ucx_reason(version: str) -> str:
    """Returns why this NIXL release cannot load its UCX plug-in here; empty if it can."""
    ask = "import os; from nixl._api import nixl_agent as agent; "
    ask += "print(agent('it').get_plugin_list(), flush=True); "
    ask += "os._exit(0)"  # NIXL 1.0 crashes in a regular interpreter exit
    found = subprocess.run(
        [str(interpreter("base")), "-c", ask],
        env={**os.environ, **nixl_environment(version)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    if "'UCX'" in found.stdout:
        return ""
    return (
        f"NIXL {version} has no UCX here: its plug-in is linked with libcuda.so.1, which this "
        "machine lacks, and for a stand-in there was no C compiler (cc) when it was installed"
    )


class ForkServer:
    """A process per engine that makes ranks: forks of itself, or with `fresh` new interpreters.

    A process that has queried NPUs must not fork processes that use them. With `nixl`, a release,
    its ranks use that NIXL instead of the base environment's. `log` has the output of its ranks.
    The ranks have their own folder for temporary files, so they do not wait for locks of other
    tests' ranks.
    """

    def __init__(self, engine: str, fresh: bool | None = None, nixl: str = "", program: str = RANK):
        fresh = device() == "npu" if fresh is None else fresh
        host = CPU_HOST if device() == "cpu" else {}
        library = nixl_environment(nixl) if nixl else {}
        environment = {**os.environ, **host, **library}
        self.folder = tempfile.TemporaryDirectory(prefix="sglang-pd-")
        self.log = Path(self.folder.name) / "log"
        self.log.touch()
        self.server = forks.fork_server(
            [str(interpreter(engine)), str(HERE / program), "fresh" if fresh else "fork"],
            environment,
            lambda _: {name: environment.get(name) for name in NIXL_PATH_VARIABLES},
        )

    def spawn(self) -> Rank:
        """Starts a new rank process."""
        connection = self.server.connect(socket.SOCK_STREAM)
        with self.log.open("ab") as log:
            socket.send_fds(connection, [self.folder.name.encode()], [log.fileno()])
        return Rank(connection)


class Rank:
    """The driver's end of one rank process."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.lines = connection.makefile("rw")
        self.config: dict = {}
        self.pid = 0

    def call(self, do: str, **arguments) -> dict:
        self.lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self.lines.flush()
        answer = self.lines.readline()
        return json.loads(answer) if answer else {"state": "died"}

    def timed(self, do: str, **arguments) -> dict:
        """Like `call`, with the `seconds` that the answer took."""
        begun = time.monotonic()
        answer = self.call(do, **arguments)
        return {**answer, "seconds": round(time.monotonic() - begun, 2)}

    def start(self, config: dict) -> None:
        self.config = config
        self._begin(config["role"], "start", config)

    def start_bootstrap(self, config: dict) -> None:
        self._begin("bootstrap", "bootstrap", config)

    def _begin(self, who: str, do: str, config: dict) -> None:
        answer = self.call(do, **config)
        if answer["state"] != "started":
            raise RuntimeError(f"{who} rank: {answer}")
        self.pid = answer["pid"]

    def close(self) -> None:
        """Closes the connection, whereupon the rank process exits."""
        self.lines.close()
        self.connection.close()


@dataclass(frozen=True)
class Outcome:
    """A request's `state`, the worst of its ranks' states, and the ranks' answers.

    `state` is `right`, `wrong` (bytes), `hang`, `failed`, `raised` or `died`, or `no metadata` if
    prefill sent everything, but the metadata to another slot.
    """

    state: str
    prefill: tuple[dict, ...]
    decode: tuple[dict, ...]

    @property
    def reasons(self) -> str:
        answers = (*self.prefill, *self.decode)
        return " | ".join(sorted({a["reason"] for a in answers if a.get("reason")}))


class Servers:
    """A running fleet."""

    bootstrap: Rank
    prefill: list[Rank]
    decode: list[Rank]

    def __init__(
        self,
        fleet: Fleet,
        start_bootstrap: Callable[[], Rank],
        start_ranks: Callable[[str], list[Rank]],
    ):
        self.fleet = fleet
        self._start_bootstrap, self._start_ranks = start_bootstrap, start_ranks
        self._rooms = count(1)
        self.start("prefill")
        self.start("decode")

    def start(self, role: str) -> None:
        """Starts a server, or restarts one whose processes are dead."""
        if role == "prefill":
            self.bootstrap = self._start_bootstrap()
        setattr(self, role, self._start_ranks(role))

    def start_another(self, role: str) -> list[Rank]:
        """Starts one more server of this side, which `request` does not use."""
        return self._start_ranks(role)

    def pids(self, role: str) -> list[int]:
        first = [self.bootstrap] if role == "prefill" else []
        return [rank.pid for rank in (*first, *getattr(self, role))]

    def request(
        self,
        src_pages: list[int],
        dst_pages: list[int],
        chunks: list[int] | None = None,
        seconds: float = 30,
        leave_out: int = 0,
    ) -> Outcome:
        """Sends one request on all ranks of both sides at once, and checks every byte on decode.

        Args:
            src_pages: The request's pages on prefill.
            dst_pages: Its pages on decode.
            chunks: Pages per chunk; one chunk by default.
            seconds: Limit for each rank.
            leave_out: How many of the last pages decode does not request.
        """
        room = next(self._rooms)
        chunks = chunks or [len(src_pages)]
        with ThreadPoolExecutor(len(self.prefill) + len(self.decode)) as pool:
            sent = [
                pool.submit(
                    rank.timed, "send", room=room, pages=src_pages, chunks=chunks, seconds=seconds
                )
                for rank in self.prefill
            ]
            received = [
                pool.submit(
                    rank.timed,
                    "receive",
                    room=room,
                    pages=dst_pages,
                    arrives=self.fleet.arriving_layers(self._layers(rank)),
                    leave_out=leave_out,
                    seconds=seconds,
                )
                for rank in self.decode
            ]
            prefill = tuple(future.result() for future in sent)
            decode = tuple(future.result() for future in received)
        return Outcome(_worst(prefill, decode), prefill, decode)

    def requests_at_once(self, wanted: list, seconds: float = 30) -> list[Outcome]:
        """Sends one request for each (decode rank, pages on prefill, pages on decode), all at once.

        Prefill and each decode server have one rank; no two requests share pages on prefill.
        """
        (prefill,) = self.prefill
        rooms = [next(self._rooms) for _ in wanted]
        with ThreadPoolExecutor(len(wanted) + 1) as pool:
            given = [[room, src_pages] for room, (_, src_pages, _) in zip(rooms, wanted)]
            sent = pool.submit(prefill.call, "send_at_once", requests=given, seconds=seconds)
            received = [
                pool.submit(
                    rank.timed,
                    "receive",
                    room=room,
                    pages=pages,
                    arrives=self.fleet.arriving_layers(self._layers(rank)),
                    leave_out=0,
                    seconds=seconds,
                )
                for room, (rank, _, pages) in zip(rooms, wanted)
            ]
            answers = [future.result() for future in received]
            ends = sent.result().get("ends", [{"state": "died"}] * len(wanted))
        pairs = [((end,), (answer,)) for end, answer in zip(ends, answers)]
        return [Outcome(_worst(*pair), *pair) for pair in pairs]

    @staticmethod
    def _layers(rank: Rank) -> range:
        start = rank.config["start_layer"]
        return range(start, start + rank.config["layers"])

    def room_counts(self) -> list[dict]:
        return [rank.call("room_counts") for rank in (*self.prefill, *self.decode)]


def _worst(prefill: tuple[dict, ...], decode: tuple[dict, ...]) -> str:
    states = {answer["state"] for answer in decode} | {
        "right" if answer["state"] == "success" else answer["state"] for answer in prefill
    }
    for state in ("died", "raised", "failed", "hang", "no metadata", "wrong"):
        if state in states:
            return state
    return "right"


@contextlib.contextmanager
def running(
    fleet: Fleet, prefill: ForkServer, decode: ForkServer, memfabric: str = ""
) -> Iterator[Servers]:
    """Starts all ranks of both servers, and stops them at the end of the block.

    With `ascend`, they use the MemFabric release `memfabric`, or by default the chosen one.
    """
    port, store_port = free_ports(2)
    memfabric = memfabric or chosen_memfabric()
    fork_servers = {"prefill": prefill, "decode": decode}
    with contextlib.ExitStack() as stack:

        def spawned(role: str) -> Rank:
            if early[role]:
                return early[role].pop()
            rank = fork_servers[role].spawn()
            stack.callback(rank.close)
            return rank

        # New interpreters are spawned early, so that they import the engine concurrently.
        early: dict[str, list[Rank]] = {"prefill": [], "decode": []}
        if device() == "npu":
            needed = {"prefill": 1 + fleet.prefill.ranks, "decode": fleet.decode.ranks}
            early |= {role: [spawned(role) for _ in range(needed[role])] for role in early}

        def bootstrap() -> Rank:
            server = spawned("prefill")
            store = store_url(store_port)
            server.start_bootstrap(
                {
                    "role": "prefill",
                    "device": device(),
                    "tp_size": fleet.prefill.tp,
                    "pp_size": fleet.prefill.pp,
                    "page_size": fleet.prefill.page_size or fleet.page_size,
                    "backend": fleet.backend,
                    "bootstrap_port": port,
                    "store": store,
                    "environment": {MEMFABRIC: memfabric, **fleet.prefill.environment},
                }
            )
            assert wait_until(lambda: is_listening(port), seconds=20), "no bootstrap server"
            return server

        def ranks(role: str) -> list[Rank]:
            configs = fleet.ranks(role, port, store_port, memfabric)
            made = [spawned(role) for _ in configs]
            with ThreadPoolExecutor(len(configs)) as pool:
                list(pool.map(Rank.start, made, configs))
            return made

        servers = Servers(fleet, bootstrap, ranks)
        if fleet.backend == "ascend":
            wait_for_memfabric_peers(memfabric)
        yield servers
