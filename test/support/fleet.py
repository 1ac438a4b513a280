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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
from engine_release import IS_0_5_18, RANK_MODULE

from pd_harness import forks
from pd_harness.cluster import CHECKOUT, PD_ENV, interpreter
from pd_harness.cpu_host import ENVIRONMENT
from pd_harness.cpu_host.memfabric import MEMFABRIC_VARIABLE as MEMFABRIC
from pd_harness.cpu_host.memfabric import chosen_memfabric
from pd_harness.device import device, gpus, wait_for_memfabric_peers
from pd_harness.polling import wait_until
from pd_harness.ports import HOST, free_ports

HERE = Path(__file__).resolve().parent
RANK = f"{RANK_MODULE}.py"
# Per machine. MemFabric rejects higher device numbers, and senders to such a device hang.
MAX_DEVICES = 16
NIXL_PATH_VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH")  # where a process finds NIXL
WORST_FIRST = ("died", "raised", "failed", "hang", "no metadata", "wrong")  # states of a request
CPU_HOST = {**ENVIRONMENT, "SGLANG_HOST_IP": HOST}
# How long decode keeps the pages of a failed request to which prefill may still write; only then
# has the request failed. The default is 30 s. Later releases keep pages of aborted requests only.
HELD_SECONDS = 4 if IS_0_5_18 else 0
HELD = {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(HELD_SECONDS)}


@dataclass(frozen=True)
class Side:
    """One server: how it splits the model, and what differs from the fleet's defaults."""

    tp: int = 1
    pp: int = 1
    draft_layers: int = 0
    dtype: str = "int64"
    # If empty, the fleet's.
    page_size: int = 0
    model_layers: int = 0
    k_width: int = 0
    kv_heads: int = 0
    fia: bool = False
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
        """Returns each rank's configuration for `rank_base.RankBase`, each on its own device.

        Ranks share GPUs if there are fewer.

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
        devices = gpus() if device() == "cuda" else MAX_DEVICES
        stages_ports = free_ports(side.tp) if side.pp > 1 else [0] * side.tp
        first = 0 if role == "prefill" else self.prefill.ranks
        common = {
            **asdict(self),
            "model_layers": self.layers,
            **{name: value for name, value in asdict(side).items() if value},
            "role": role,
            "device": device(),
            "bootstrap_port": bootstrap_port,
            "speculates": drafts[role],
            "sends_hidden_states": drafts["prefill"] == drafts["decode"],
            "sent_drafts": min(self.prefill.draft_layers, self.decode.draft_layers),
        }
        common["environment"] = {
            MEMFABRIC: memfabric,
            "ASCEND_MF_STORE_URL": f"tcp://{HOST}:{store_port}",
            "ASCEND_USE_FIA": str(common["fia"]),
            **(HELD if HELD_SECONDS else {}),
            **side.environment,
        }
        return [
            {
                **common,
                "gpu_id": (first + pp_rank * side.tp + tp_rank) % devices,
                "tp_rank": tp_rank,
                "tp_size": side.tp,
                "pp_rank": pp_rank,
                "pp_size": side.pp,
                "stages_port": stages_ports[tp_rank],
                "prefill_pp_size": self.prefill.pp,
                "decode_tp_size": self.decode.tp,
                "layers": sizes[pp_rank],
                "start_layer": starts[pp_rank],
                "draft_layers": side.draft_layers if pp_rank == side.pp - 1 else 0,
            }
            for tp_rank in range(side.tp)
            for pp_rank in range(side.pp)
        ]


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

    A process that has queried NPUs or GPUs must not fork processes that use them. With `nixl`, a
    release, its ranks use that NIXL instead of the base environment's. `log` has their output. The
    ranks have their own folder for temporary files, so they do not wait for locks of other
    tests' ranks.
    """

    def __init__(self, engine: str, fresh: bool | None = None, nixl: str = "", program: str = RANK):
        fresh = device() != "cpu" if fresh is None else fresh
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

    def start(self, config: dict, do: str = "start") -> None:
        """Starts the rank, or with `bootstrap` prefill's bootstrap server."""
        self.config = config
        answer = self.call(do, **config)
        if answer["state"] != "started":
            raise RuntimeError(f"{config['role']} rank, {do}: {answer}")
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

    @classmethod
    def of(cls, prefill: tuple[dict, ...], decode: tuple[dict, ...]) -> Outcome:
        """Returns the outcome of these ranks' answers."""
        states = {answer["state"] for answer in (*prefill, *decode)}
        return cls(next((s for s in WORST_FIRST if s in states), "right"), prefill, decode)

    @property
    def reasons(self) -> str:
        answers = (*self.prefill, *self.decode)
        return " | ".join(sorted({a["reason"] for a in answers if a.get("reason")}))


class Servers:
    """A running fleet; `rooms` yields the rooms of its next requests."""

    bootstrap: Rank
    prefill: list[Rank]
    decode: list[Rank]

    def __init__(
        self,
        fleet: Fleet,
        fork_servers: dict[str, ForkServer],
        memfabric: str,
        stack: contextlib.ExitStack,
    ):
        """Starts both servers; `stack` closes their ranks."""
        self.fleet = fleet
        self.rooms = count(1)
        self._fork_servers, self._memfabric, self._stack = fork_servers, memfabric, stack
        self._bootstrap_port, self._store_port = free_ports(2)
        self._early: dict[str, list[Rank]] = {"prefill": [], "decode": []}
        # New interpreters are spawned early, so that they import the engine concurrently.
        if device() != "cpu":
            needed = {"prefill": 1 + fleet.prefill.ranks, "decode": fleet.decode.ranks}
            self._early = {
                role: [self._spawn(role) for _ in range(ranks)] for role, ranks in needed.items()
            }
        self.start("prefill")
        self.start("decode")

    def start(self, role: str) -> None:
        """Starts a server, or restarts one whose processes are dead."""
        if role == "prefill":
            self.bootstrap = self._spawn(role)
            self.bootstrap.start(self._configs(role)[0], "bootstrap")
            listens = wait_until(lambda: is_listening(self._bootstrap_port), seconds=20)
            assert listens, "no bootstrap server"
        setattr(self, role, self.start_another(role))

    def start_another(self, role: str, side: Side | None = None) -> list[Rank]:
        """Starts one more server of this side, which `request` does not use.

        Args:
            side: Its sizes, if they are not the side's.
        """
        fleet = self.fleet if side is None else replace(self.fleet, **{role: side})
        configs = self._configs(role, fleet)
        ranks = [self._spawn(role) for _ in configs]
        with ThreadPoolExecutor(len(configs)) as pool:
            list(pool.map(Rank.start, ranks, configs))
        return ranks

    def _spawn(self, role: str) -> Rank:
        if self._early[role]:
            return self._early[role].pop()
        rank = self._fork_servers[role].spawn()
        self._stack.callback(rank.close)
        return rank

    def _configs(self, role: str, fleet: Fleet | None = None) -> list[dict]:
        fleet = fleet or self.fleet
        return fleet.ranks(role, self._bootstrap_port, self._store_port, self._memfabric)

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
        room: int | None = None,
    ) -> Outcome:
        """Sends one request on all ranks of both sides at once, and checks every byte on decode.

        Args:
            src_pages: The request's pages on prefill.
            dst_pages: Its pages on decode.
            chunks: Pages per chunk; one chunk by default.
            seconds: Limit for each rank.
            leave_out: How many of the last pages decode does not request.
            room: The next of `rooms` by default.
        """
        room = next(self.rooms) if room is None else room
        with ThreadPoolExecutor(len(self.prefill) + len(self.decode)) as pool:
            sent = pool.map(
                lambda rank: self.send(rank, room, src_pages, chunks, seconds), self.prefill
            )
            received = pool.map(
                lambda rank: self.receive(rank, room, dst_pages, seconds, leave_out), self.decode
            )
            return Outcome.of(tuple(sent), tuple(received))

    def send(
        self,
        rank: Rank,
        room: int,
        pages: list[int],
        chunks: list[int] | None = None,
        seconds: float = 30,
    ) -> dict:
        """Sends a request from one prefill rank; see `request`. Returns its timed answer."""
        sizes = chunks or [len(pages)]
        return rank.timed("send", room=room, pages=pages, chunks=sizes, seconds=seconds)

    def receive(
        self, rank: Rank, room: int, pages: list[int], seconds: float = 30, leave_out: int = 0
    ) -> dict:
        """Receives a request on one decode rank; see `request`. Returns its timed answer."""
        wanted = {"room": room, "pages": pages, "leave_out": leave_out}
        return rank.timed("receive", **wanted, seconds=seconds)

    def requests_at_once(self, wanted: list, seconds: float = 30) -> list[Outcome]:
        """Sends one request for each (decode rank, pages on prefill, pages on decode), all at once.

        Prefill and each decode server have one rank; no two requests share pages on prefill.
        """
        (prefill,) = self.prefill
        rooms = [next(self.rooms) for _ in wanted]
        with ThreadPoolExecutor(len(wanted) + 1) as pool:
            given = [[room, src_pages] for room, (_, src_pages, _) in zip(rooms, wanted)]
            sent = pool.submit(prefill.call, "send_at_once", requests=given, seconds=seconds)
            decode = [(rank, room, pages) for room, (rank, _, pages) in zip(rooms, wanted)]
            answers = list(pool.map(lambda one: self.receive(*one, seconds), decode))
            ends = sent.result().get("ends", [{"state": "died"}] * len(wanted))
        return [Outcome.of((end,), (answer,)) for end, answer in zip(ends, answers)]

    def room_counts(self) -> list[dict]:
        return [rank.call("room_counts") for rank in (*self.prefill, *self.decode)]


@contextlib.contextmanager
def running(
    fleet: Fleet, prefill: ForkServer, decode: ForkServer, memfabric: str = ""
) -> Iterator[Servers]:
    """Starts all ranks of both servers, and stops them at the end of the block.

    With `ascend`, they use the MemFabric release `memfabric`, or by default the chosen one.
    """
    memfabric = memfabric or chosen_memfabric()
    with contextlib.ExitStack() as stack:
        servers = Servers(fleet, {"prefill": prefill, "decode": decode}, memfabric, stack)
        if fleet.backend == "ascend":
            wait_for_memfabric_peers(memfabric)
        yield servers
