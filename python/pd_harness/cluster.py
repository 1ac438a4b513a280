"""Start real prefill, decode and single servers and the router, send requests, and stop them all.

For the demo and the serving tests: everything runs on this machine, either on the CPU host in the
environments that `scripts/setup.sh` makes, or on NPUs in the Python that runs this module.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx

from pd_harness import forks
from pd_harness.cpu_host import ENVIRONMENT, thread_binding
from pd_harness.cpu_host.memfabric import MEMFABRIC_VARIABLE as MEMFABRIC
from pd_harness.cpu_host.memfabric import memfabric_for
from pd_harness.device import DTYPES, device, npus
from pd_harness.ports import HOST, free_port_range, free_ports
from pd_harness.releases import release

CHECKOUT = Path(__file__).resolve().parents[2]
PD_ENV = CHECKOUT / ".pd-env"
# One engine release's environments, the models it reads, and its recorded answers.
RELEASE_ENV = PD_ENV / release()
SUPERVISOR = Path(__file__).with_name("supervisor.py")
START_TIMEOUT_S = 300  # a TP 4 server on two busy cores takes about a minute
MAX_TOKENS = 8192  # of a server's KV pool
# Ports from `--dist-init-addr` on: a few for its processes, the last for DP attention's handshake.
DIST_PORTS = 14
# httpx's options for servers on this machine: no proxy, and no certificates, which take 20 ms of a
# core to load.
LOCAL_HTTP = {"trust_env": False, "verify": False}
NPU_PAGE_SIZE = 128  # tokens; the size that the NPU's attention expects
# Each round computes two drafted tokens, has one already, and verifies all at once.
DRAFT_OPTIONS = (
    *("--speculative-algorithm", "EAGLE"),
    *("--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
    "--disable-cuda-graph",  # the draft model's; others exist on accelerators only
)
# The engine's default size, 4 GiB per rank, is for larger models.
STAGING_VARIABLES = {
    "SGLANG_DISAGG_STAGING_BUFFER": "1",
    "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "64",
}
RANKS_FROM = "SGLANG_PD_RANKS_FROM"  # on NPUs: how many ranks the smallest fleet to run has
ONE_ENGINE = "on NPUs and GPUs the only engine is this Python's, and it is patched"


class ServerFailed(RuntimeError):
    """A server exited, or was not ready in time; the message has the tail of its log."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Sizes of the two sides, and how KV travels between them.

    With a ``dp`` above 1 that side's attention is data parallel: its TP ranks form ``dp`` groups.
    ``page_size`` is in tokens, for both sides, or for prefill alone if ``decode_page_size`` is
    set; ``fia`` selects the NPU pools' other layout, with ``ascend`` only.
    ``retract`` makes decode retract a request every third step and resume it later; a pool of
    ``decode_tokens`` that is too small for all requests has the same effect.
    With ``decode_prefixes`` decode has a radix cache and prefill has none, and prefill does not
    send the prefixes that decode has; with ``staging`` the engine gathers heads for other ranks
    in a buffer first. 0.5.9 supports neither.
    """

    backend: str = "nixl"
    prefill_tp: int = 1
    prefill_pp: int = 1
    prefill_dp: int = 1
    decode_tp: int = 1
    decode_pp: int = 1
    decode_dp: int = 1
    page_size: int = 1
    decode_page_size: int | None = None
    fia: bool = False
    retract: bool = False
    decode_tokens: int = MAX_TOKENS
    decode_prefixes: bool = False
    staging: bool = False

    @property
    def attention(self) -> str:
        """The attention backend, which decides the type of the KV pools."""
        return "ascend" if self.backend == "ascend" else "torch_native"

    @property
    def ranks(self) -> tuple[int, int]:
        """The numbers of prefill ranks and of decode ranks."""
        return self.prefill_tp * self.prefill_pp, self.decode_tp * self.decode_pp

    @property
    def expects_retractions(self) -> bool:
        """Whether this topology makes decode retract requests."""
        return self.retract or self.decode_tokens < MAX_TOKENS

    def memfabric(self, decode_engine: str) -> dict[str, str]:
        """Variables that select one of the CPU host's MemFabric releases for both servers."""
        if self.backend != "ascend" or device() != "cpu":
            return {}
        return {MEMFABRIC: memfabric_for(decode_engine)}

    def environment(self, store_port: int) -> dict[str, str]:
        """Variables of both servers; with ``ascend``, prefill's MemFabric store is at the port."""
        staging = STAGING_VARIABLES if self.staging else {}
        if self.backend != "ascend":
            return staging
        store = f"tcp://{HOST}:{store_port}"
        return {"ASCEND_MF_STORE_URL": store, "ASCEND_USE_FIA": str(int(self.fia)), **staging}


@dataclasses.dataclass(frozen=True)
class Answer:
    """Generated token ids and the log-probability of each, or why there are none.

    ``rounds`` counts how often the target verified a draft model's tokens, ``cached`` how many of
    the prompt's tokens a server already had.
    """

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    failure: str | None = None  # "hang", "connection: ...", or "http 500: ..." and the body's start
    seconds: float = 0.0
    rounds: int = 0
    cached: int = 0


def interpreter(environment: str) -> Path:
    """The Python of ``stock``, ``patched`` or ``base``, which has everything but an engine.

    On NPUs and GPUs ``patched`` and ``base`` are the Python that runs this module.

    Raises:
        FileNotFoundError: the environment does not exist, or is ``stock`` on an NPU or a GPU.
    """
    if device() != "cpu":
        if environment == "stock":
            raise FileNotFoundError(ONE_ENGINE)
        return Path(sys.executable)
    folder = PD_ENV if environment == "base" else RELEASE_ENV
    python = folder / environment / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(
            f"{python} does not exist: run scripts/setup.sh --release {release()} first"
        )
    return python


@functools.cache
def engine_folder(environment: str) -> Path:
    """The folder `sglang/` that servers of ``stock`` or ``patched`` import.

    Raises:
        FileNotFoundError: the environment does not exist, or is ``stock`` on an NPU or a GPU.
    """
    ask = "import importlib.util; print(importlib.util.find_spec('sglang').origin)"
    command = [str(interpreter(environment)), "-c", ask]
    # `-c` also imports from the working folder: use one without a `sglang/`.
    found = subprocess.run(
        command, cwd=SUPERVISOR.parent, stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(found.stdout.splitlines()[-1]).parent


def skip_reason(backend: str, ranks: int, engines: Collection[str]) -> str | None:
    """Why a fleet with this many ranks cannot run on this device; None if it can."""
    if device() == "cpu":
        return None
    of_device = "nixl" if device() == "cuda" else "ascend"
    if backend != of_device:
        return f"on {device()} the backend is {of_device}, not {backend}"
    if "stock" in engines:
        return ONE_ENGINE
    if device() == "cuda":
        return None  # ranks share GPUs
    least = int(os.environ.get(RANKS_FROM, "1"))
    if ranks < least:
        return f"{RANKS_FROM} is {least}: a smaller machine runs fleets of {ranks} ranks"
    if ranks > npus():
        return f"it needs {ranks} NPUs, one for each rank; this machine has {npus()}"
    return None


class SupervisedProcess(subprocess.Popen):
    """A command under a supervisor, which kills it when this process exits for any reason."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log):
        super().__init__(
            [sys.executable, "-I", "-S", str(SUPERVISOR), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            process_group=0,
        )

    def stop(self) -> None:
        """Kill the command and everything it started."""
        self.stdin.close()
        self.wait()


@dataclasses.dataclass
class Server:
    """One child process with a port and a log; it is stopped with its whole process group."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    ready_path: str = "/health"
    needs_others: bool = False  # `running` starts it when the others are ready
    bootstrap_port: int | None = None  # prefill servers only
    fork: bool = False  # start it as a fork of a process that has imported its engine

    def start(self) -> None:
        """Start it, so that it is killed when this process exits for any reason.

        Raises:
            ForkServerFailed: the engine could not be imported.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            if self.fork:
                python, _, module, *arguments = self.command
                self.process = forks.fork(python, module, arguments, self.environment, log)
            else:
                self.process = SupervisedProcess(self.command, self.environment, log)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def check_running(self) -> None:
        """Raise `ServerFailed` if the process has exited."""
        if self.has_ended():
            status = self.process.returncode
            raise ServerFailed(f"{self.name} exited with status {status}\n{self.log_tail()}")

    def is_ready(self, client: httpx.Client) -> bool:
        """Whether the server answers ``client`` with status 200 at ``ready_path``."""
        try:
            return client.get(self.url + self.ready_path).status_code == 200
        except httpx.HTTPError:
            return False

    def log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"end of {self.log}:", *text[-lines:]])

    def stop(self) -> None:
        """Kill the process and everything it started."""
        self.process.stop()


def engine_server(
    name: str,
    engine: str,
    model: Path,
    logs: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    page_size: int = 1,
    attention: str = "torch_native",
    first_npu: int = 0,
    max_tokens: int = MAX_TOKENS,
    max_requests: int = 16,
    chunk: int = 256,
    overlap: bool = False,
    idle_sleep: bool = True,
    kv_dtype: str = "auto",
    draft: Path | None = None,
    metrics: bool = False,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Server:
    """An engine server, small and quick to start, on the CPU host or on NPUs.

    ``chunk`` is how many tokens of a prompt are prefilled at once; with ``overlap`` the engine
    schedules a batch while it computes the previous one; with ``idle_sleep`` an idle scheduler
    yields its core (`cpu_host.idle`). ``kv_dtype`` is the KV pool's dtype, "auto" the model's.
    With ``draft``, a draft model's folder, the server speculates; with ``metrics`` it has
    ``/metrics``. ``options`` are added to its command, ``environment`` to its environment. Its
    processes are forks where possible, see `forks`. On NPUs each rank has one, from ``first_npu``
    on; attention and page size are then fixed, and nothing is forked.
    """
    port, nccl_port = free_ports(2)
    on_npu = device() == "npu"
    if on_npu:
        attention, page_size = "ascend", NPU_PAGE_SIZE
    command = [str(interpreter(engine)), "-m", "sglang.launch_server"]
    command += ["--model-path", str(model), "--served-model-name", "tiny"]
    command += ["--host", HOST, "--port", str(port), "--nccl-port", str(nccl_port)]
    command += ["--device", device(), "--dtype", DTYPES[device()], "--kv-cache-dtype", kv_dtype]
    command += ["--tp-size", str(tp), "--pp-size", str(pp), "--page-size", str(page_size)]
    if dp > 1:
        command += ["--dp-size", str(dp), "--enable-dp-attention"]
        command += ["--dist-init-addr", f"{HOST}:{free_port_range(DIST_PORTS)}"]
    command += ["--max-total-tokens", str(max_tokens), "--max-running-requests", str(max_requests)]
    command += ["--chunked-prefill-size", str(chunk), "--random-seed", "0"]
    command += ["--attention-backend", attention, "--grammar-backend", "none"]
    command += ["--skip-server-warmup", *(["--sleep-on-idle"] if idle_sleep else [])]
    if not overlap:
        command += ["--disable-overlap-schedule"]
    if draft is not None:
        command += ["--speculative-draft-model-path", str(draft), *DRAFT_OPTIONS]
    if metrics:
        command += ["--enable-metrics"]
    if on_npu:
        command += ["--base-gpu-id", str(first_npu), "--disable-cuda-graph"]
        host = {}
    else:
        host = {**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": thread_binding(tp, pp)}
    log, variables = logs / f"{name}.log", {**host, **environment}
    return Server(name, [*command, *options], port, log, variables, fork=not on_npu)


def pd_servers(
    topology: Topology,
    model: Path,
    logs: Path,
    prefill_engine: str,
    decode_engine: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    **both,
) -> tuple[Server, Server, Server]:
    """A prefill server, a decode server and the router in front of them.

    ``environment`` and ``both`` (options of `engine_server`) apply to the two engine servers.
    """
    (store_port,) = free_ports(1)
    both["environment"] = {**topology.memfabric(decode_engine), **environment}
    prefill = prefill_server(topology, prefill_engine, model, logs, store_port, **both)
    decode = decode_server(topology, decode_engine, model, logs, store_port, **both)
    return prefill, decode, router([prefill], [decode], logs)


def prefill_server(
    topology: Topology,
    engine: str,
    model: Path,
    logs: Path,
    store_port: int,
    *,
    name: str = "prefill",
    **more,
) -> Server:
    """The prefill server of a topology; ``more`` are options of `engine_server`."""
    (bootstrap_port,) = free_ports(1)
    options = ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    if topology.decode_prefixes:
        options += ["--disable-radix-cache"]
    where = (name, engine, model, logs)
    own = {"page_size": topology.page_size, "options": options}
    server = _server_of_side("prefill", topology, store_port, *where, **own, **more)
    server.bootstrap_port = bootstrap_port
    return server


def decode_server(
    topology: Topology,
    engine: str,
    model: Path,
    logs: Path,
    store_port: int,
    *,
    name: str = "decode",
    **more,
) -> Server:
    """The decode server of a topology; ``more`` are options of `engine_server`."""
    # Reserved per request: with few tokens, decode admits more requests than it can finish.
    reserved = "1" if topology.expects_retractions else "512"
    options = ["--num-reserved-decode-tokens", reserved]
    if release() != "0.5.9":  # its default, a backup to pinned memory, needs an accelerator
        options += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    if topology.decode_prefixes:
        options += ["--disaggregation-decode-enable-radix-cache"]
    where = (name, engine, model, logs)
    own = {"page_size": topology.decode_page_size or topology.page_size, "options": options}
    own |= {"first_npu": topology.ranks[0], "max_tokens": topology.decode_tokens}
    server = _server_of_side("decode", topology, store_port, *where, **own, **more)
    if topology.retract:
        server.environment.setdefault("SGLANG_TEST_RETRACT", "1")
    return server


def _server_of_side(side: str, topology: Topology, store_port: int, *where, options, **more):
    """What both sides' servers have in common; ``side`` is ``prefill`` or ``decode``."""
    sizes = {size: getattr(topology, f"{side}_{size}") for size in ("tp", "pp", "dp")}
    mode = ["--disaggregation-mode", side, "--disaggregation-transfer-backend", topology.backend]
    more["environment"] = {**topology.environment(store_port), **more.get("environment", {})}
    more |= {"attention": topology.attention, "options": [*mode, *options]}
    return engine_server(*where, **sizes, **more)


def router(
    prefills: Sequence[Server], decodes: Sequence[Server], logs: Path, name: str = "router"
) -> Server:
    """The router in front of these servers; it starts when they are ready."""
    port, metrics_port = free_ports(2)
    # The router's launcher imports an engine if it finds one, which takes 3 s: base has none, and
    # a fork has imported it.
    forked = next((server for server in prefills if server.fork), None)
    python = forked.command[0] if forked else str(interpreter("base"))
    command = [python, "-m", "sglang_router.launch_router"]
    command += ["--pd-disaggregation", "--host", HOST, "--port", str(port)]
    command += ["--prometheus-host", HOST, "--prometheus-port", str(metrics_port)]
    for prefill in prefills:
        command += ["--prefill", prefill.url, str(prefill.bootstrap_port)]
    for decode in decodes:
        command += ["--decode", decode.url]
    command += ["--worker-startup-check-interval", "1"]
    # A retry would hide the first answer, an open circuit the next ones.
    command += ["--disable-retries", "--disable-circuit-breaker"]
    log = logs / f"{name}.log"
    # It waits for the others: it drops a server that does not answer for about 100 s.
    return Server(
        name,
        command,
        port,
        log,
        dict(forked.environment) if forked else {},
        ready_path="/readiness",
        needs_others=True,
        fork=forked is not None,
    )


@contextlib.contextmanager
def running(
    servers: Sequence[Server],
    seconds: float = START_TIMEOUT_S,
    on_ready: Callable[[Server], None] = lambda server: None,
) -> Iterator[None]:
    """Start the servers, wait until all are ready, and stop them when the block exits.

    Raises:
        ServerFailed: a server exited early, or was not ready after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        for last in (False, True):
            group = [server for server in servers if server.needs_others == last]
            for server in group:
                server.start()
                stack.callback(server.stop)
            wait_ready(group, deadline, on_ready)
        yield


def wait_ready(
    servers: Sequence[Server], deadline: float, on_ready: Callable[[Server], None]
) -> None:
    """Poll the servers in order until all are ready, and call ``on_ready`` once for each.

    ``deadline`` is a time of ``time.monotonic()``.

    Raises:
        ServerFailed: a server exited, or was not ready at the deadline.
    """
    waiting = list(servers)
    with httpx.Client(timeout=5, **LOCAL_HTTP) as client:
        while waiting:
            for server in waiting:
                server.check_running()
            if waiting[0].is_ready(client):
                on_ready(waiting.pop(0))
            elif time.monotonic() > deadline:
                tails = "\n".join(server.log_tail() for server in waiting)
                raise ServerFailed(f"{waiting[0].name} was not ready in time\n{tails}")
            else:
                time.sleep(0.1)


def ask(
    url: str,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    seconds: float,
    at_once: int | None = None,
    is_lost: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Send prompts (token ids), all or ``at_once`` at a time; greedily decode ``new_tokens`` each.

    A prompt without an answer after ``seconds``, or once ``is_lost()`` is true, is a hang.
    """
    asking = ask_all(url, prompts, new_tokens, seconds, at_once or len(prompts), is_lost)
    return asyncio.run(asking)


async def ask_all(
    url, prompts, new_tokens, seconds, at_once, is_lost=lambda: False
) -> list[Answer]:
    """`ask` as a coroutine; a client that hangs up cancels it."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt) -> Answer:
        async with places:
            return await _send_prompt(client, url, prompt, new_tokens, seconds)

    async with httpx.AsyncClient(timeout=seconds, **LOCAL_HTTP) as client:
        asking = [asyncio.create_task(one(prompt)) for prompt in prompts]
        try:
            while (await asyncio.wait(asking, timeout=0.5))[1]:
                if await asyncio.to_thread(is_lost):
                    break
        finally:
            for task in asking:
                task.cancel()
        await asyncio.wait(asking)
    hang = Answer(failure="hang")
    return [hang if task.cancelled() else task.result() for task in asking]


def greedy_body(prompt: Sequence[int], new_tokens: int) -> dict:
    """A request for this many tokens, decoded greedily, as `/generate` takes it."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


async def _send_prompt(client, url, prompt, new_tokens, seconds) -> Answer:
    body = {**greedy_body(prompt, new_tokens), "return_logprob": True, "logprob_start_len": -1}
    start = time.monotonic()

    def failed(why: str) -> Answer:
        return Answer(failure=why, seconds=time.monotonic() - start)

    try:
        response = await asyncio.wait_for(client.post(f"{url}/generate", json=body), seconds)
    except (asyncio.TimeoutError, httpx.TimeoutException):
        return failed("hang")
    except httpx.HTTPError as error:
        return failed(f"connection: {error!r}")
    if response.status_code != 200:
        return failed(f"http {response.status_code}: {response.text[:1000]}")
    about = response.json()["meta_info"]
    rows = about["output_token_logprobs"]
    return Answer(
        ids=tuple(row[1] for row in rows),
        logprobs=tuple(row[0] for row in rows),
        seconds=time.monotonic() - start,
        rounds=about.get("spec_verify_ct", 0),
        cached=about["cached_tokens"],
    )
