"""The choice of device for servers and their options there; no server and no NPU is needed."""

import json
import sys
from pathlib import Path

import fleet as fleets
import pytest
import server_pairs
import serving_checks
from serving_scenarios import (
    PROMPT_LENGTHS,
    SCENARIOS,
    NpuMLA,
    long_answer,
    page_count,
    pool_tokens,
)

from pd_harness import cluster, device


@pytest.fixture
def four_npus(monkeypatch):
    """Simulates a runner with four NPUs."""
    monkeypatch.setattr(device, "npus", lambda: 4)
    monkeypatch.setattr(cluster, "npus", lambda: 4)
    monkeypatch.delenv(device.DEVICE_VARIABLE, raising=False)


@pytest.fixture
def one_gpu(monkeypatch):
    """Simulates a machine with one GPU."""
    for module in (device, fleets):
        monkeypatch.setattr(module, "gpus", lambda: 1)
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cuda")


@pytest.fixture
def no_npu(monkeypatch):
    monkeypatch.setattr(device, "npus", lambda: 0)
    monkeypatch.delenv(device.DEVICE_VARIABLE, raising=False)


def option(server: cluster.Server, name: str) -> str:
    return server.command[server.command.index(name) + 1]


def test_npu_is_used_if_present(four_npus):
    assert (device.device(), device.npu_skip_reason()) == ("npu", None)


def test_cpu_host_is_used_without_npu(no_npu):
    assert device.device() == "cpu"
    assert device.npu_skip_reason() == "no NPU: torch_npu is not installed"


def test_device_variable_overrides_detection(four_npus, monkeypatch):
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cpu")
    assert (device.device(), device.npu_skip_reason()) == ("cpu", "no NPU: SGLANG_PD_DEVICE is cpu")
    monkeypatch.setenv(device.DEVICE_VARIABLE, "npu")
    assert device.device() == "npu"
    monkeypatch.setenv(device.DEVICE_VARIABLE, "NPU")
    with pytest.raises(ValueError, match="'NPU'; set it to one of cpu, npu, cuda"):
        device.device()


def test_requested_npu_must_exist(no_npu, monkeypatch):
    """Otherwise a runner that lost its NPUs would skip every test and report success."""
    monkeypatch.setenv(device.DEVICE_VARIABLE, "npu")
    with pytest.raises(RuntimeError, match="is npu, but torch_npu is not installed"):
        device.npu_skip_reason()


def test_old_memfabric_and_npus_wait_for_peers(no_npu, monkeypatch):
    waits = []
    monkeypatch.setattr(device.time, "sleep", waits.append)
    device.wait_for_memfabric_peers("1.3.0")
    assert not waits
    device.wait_for_memfabric_peers("1.0.8")
    monkeypatch.setattr(device, "npus", lambda: 1)
    device.wait_for_memfabric_peers("1.3.0")
    assert len(waits) == 2 and min(waits) > 9


def test_server_options_on_npus(four_npus, tmp_path):
    topology = cluster.Topology("ascend", prefill_tp=1, prefill_pp=2, page_size=16, fia=True)
    servers = cluster.pd_servers(topology, Path("model"), tmp_path, "patched", "patched")
    prefill, decode, router = servers
    for server in (prefill, decode):
        assert server.command[0] == sys.executable
        assert option(server, "--device") == "npu"
        assert option(server, "--dtype") == "float16"
        assert option(server, "--attention-backend") == "ascend"
        assert option(server, "--page-size") == "128"
        assert option(server, "--disaggregation-transfer-backend") == "ascend"
        assert set(server.environment) == {"ASCEND_MF_STORE_URL", "ASCEND_USE_FIA"}
        assert server.environment["ASCEND_USE_FIA"] == "1"
    assert [option(server, "--base-gpu-id") for server in (prefill, decode)] == ["0", "2"]
    assert prefill.environment == decode.environment
    store = prefill.environment["ASCEND_MF_STORE_URL"]
    assert store.startswith("tcp://127.0.0.1:")
    assert int(store.rpartition(":")[2]) not in {server.port for server in servers}
    assert router.command[:3] == [sys.executable, "-m", "sglang_router.launch_router"]


def test_no_stock_engine_on_npus(four_npus):
    with pytest.raises(FileNotFoundError, match="the only engine"):
        cluster.interpreter("stock")


def test_server_options_on_cpu_host(no_npu, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "interpreter", lambda engine: Path(engine))
    topology = cluster.Topology("ascend", prefill_pp=2, page_size=16)
    prefill, decode, _ = cluster.pd_servers(topology, Path("m"), tmp_path, "stock", "patched")
    assert (prefill.command[0], decode.command[0]) == ("stock", "patched")
    for server in (prefill, decode):
        assert (option(server, "--device"), option(server, "--dtype")) == ("cpu", "float32")
        assert option(server, "--page-size") == "16"
        assert "--base-gpu-id" not in server.command
        assert server.environment["SGLANG_PD_CPU_HOST"] == "1"


def test_four_npus_run_all_but_largest_scenarios(four_npus):
    """Each rank needs one."""
    fleets_of = {scenario.name: scenario.topology for scenario in SCENARIOS}
    served = {
        name
        for name, topology in fleets_of.items()
        if not cluster.skip_reason(topology.backend, sum(topology.ranks), ("patched",) * 2)
    }
    larger = ("mla_pp2_tp2_to_2", "mla_pp2_tp2_to_1", "mla_pp2_dp2_to_dp2")
    ascend = {name for name in fleets_of if name.startswith("ascend-")}
    assert served == ascend - {f"ascend-{name}" for name in larger}


def test_gpus_are_used_only_if_named(no_npu, monkeypatch):
    monkeypatch.setattr(device, "gpus", lambda: 1)
    assert device.device() == "cpu"


def test_requested_gpu_must_exist(monkeypatch):
    monkeypatch.setenv(device.DEVICE_VARIABLE, "cuda")
    monkeypatch.setattr(device, "gpus", lambda: 0)
    with pytest.raises(RuntimeError, match="is cuda, but torch sees no GPU"):
        device.device()


def test_ranks_share_a_gpu(one_gpu):
    """They run in this Python, over NIXL alone."""
    assert cluster.interpreter("patched") == Path(sys.executable)
    assert cluster.skip_reason("nixl", 8, ("patched", "patched")) is None
    assert "backend is nixl" in cluster.skip_reason("mooncake", 2, ("patched", "patched"))
    assert "only engine" in cluster.skip_reason("nixl", 2, ("stock", "patched"))
    fleet = fleets.Fleet(fleets.Side(tp=2), fleets.Side())
    ranks = [*fleet.ranks("prefill", 1, 2), *fleet.ranks("decode", 1, 2)]
    assert [(rank["device"], rank["gpu_id"]) for rank in ranks] == [("cuda", 0)] * 3


def test_servers_do_not_run_on_gpus(one_gpu):
    with pytest.raises(pytest.skip.Exception, match="ranks without a model"):
        server_pairs.skip_if_unsupported(cluster.Topology("nixl"), "patched")


@pytest.mark.parametrize(
    "backend, ranks, engines, reason",
    [
        ("nixl", 3, ("patched", "patched"), "the backend is ascend, not nixl"),
        ("ascend", 5, ("patched", "patched"), "5 NPUs, one for each rank; this machine has 4"),
        ("ascend", 3, ("stock", "patched"), "only engine is this Python's"),
        ("ascend", 2, ("patched", "patched"), "a smaller machine runs fleets of 2 ranks"),
    ],
)
def test_skip_reason_of_npus(four_npus, monkeypatch, backend, ranks, engines, reason):
    monkeypatch.setenv(cluster.RANKS_FROM, "3")
    assert reason in cluster.skip_reason(backend, ranks, engines)


def test_cpu_host_runs_all_fleets(no_npu):
    assert cluster.skip_reason("nixl", 8, ("stock", "patched")) is None


@pytest.mark.parametrize("page_size", [16, cluster.NPU_PAGE_SIZE])
def test_full_pool_fits_prompts_but_not_all_answers(page_size):
    """With any page size, each request can finish alone while the other prompts wait."""
    answer = long_answer(page_size)
    pool = pool_tokens(page_size, answer) // page_size
    prompts = page_count(PROMPT_LENGTHS, page_size)
    for length in PROMPT_LENGTHS:
        alone = page_count([length + answer], page_size) - page_count([length], page_size)
        assert prompts + alone <= pool
    assert pool < page_count([length + answer for length in PROMPT_LENGTHS], page_size)


@pytest.mark.parametrize("environment", ["stock", "patched"])
def test_engine_folder_is_that_of_its_python(no_npu, environment, tmp_path):
    """An image's engine may be an editable install, and its Python may not be 3.11."""
    try:
        folder = cluster.engine_folder(environment)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert (folder / "srt" / "disaggregation").is_dir()
    is_patched = (folder / "srt" / "disaggregation" / "kv_layout").is_dir()
    assert is_patched == (environment == "patched")


class RecordingForkServer:
    """Stands in for a fork server and its ranks; records their calls in order."""

    def __init__(self):
        self.done = []
        self.pid = 0

    def spawn(self):
        self.done.append("spawn")
        return self

    def start(self, config, do: str = "start") -> None:
        self.done.append("start")

    def close(self) -> None:
        self.done.append("close")


@pytest.mark.parametrize("where, early", [("npu", 5), ("cpu", 1)])
def test_ranks_on_npus_import_engine_concurrently(monkeypatch, where, early):
    """Otherwise each fleet would need three imports, one after the other."""
    monkeypatch.setattr(fleets, "device", lambda: where)
    monkeypatch.setattr(fleets, "is_listening", lambda port: True)
    monkeypatch.setattr(fleets.Rank, "start", RecordingForkServer.start)
    spawning = RecordingForkServer()
    fleet = fleets.Fleet(fleets.Side(pp=2), fleets.Side(tp=2), layers=4)
    with fleets.running(fleet, spawning, spawning):
        assert spawning.done.index("start") == early
        assert spawning.done.count("spawn") == spawning.done.count("start") == 1 + fleet.size
    assert spawning.done.count("close") == 1 + fleet.size


def answers(*rows):
    return [cluster.Answer(tuple(ids), tuple(logprobs)) for ids, logprobs in rows]


WANT = answers(([1, 2, 3], [-0.5, -0.5, -0.5]), ([4, 5, 6], [-0.1, -0.1, -0.1]))
TIE = answers(([1, 7, 9], [-0.5, -0.51, -3.0]), ([4, 5, 6], [-0.1, -0.1, -0.1]))
NO_TIE = answers(([1, 7, 9], [-0.5, -0.7, -3.0]), ([4, 5, 6], [-0.1, -0.1, -0.1]))
APART = answers(([1, 2, 3], [-0.5, -0.5, -0.5]), ([4, 5, 6], [-0.1, -0.2, -0.1]))


@pytest.mark.parametrize(
    "got, cpu, npu",
    [
        pytest.param(WANT, "right", "right", id="equal"),
        pytest.param(TIE, "wrong", "right", id="tie"),
        pytest.param(NO_TIE, "wrong", "wrong", id="no_tie"),
        pytest.param(APART, "wrong", "wrong", id="apart"),
    ],
)
def test_answers_may_differ_at_ties_on_npus_only(got, cpu, npu, monkeypatch):
    for where, expected in (("cpu", cpu), ("npu", npu)):
        monkeypatch.setattr(serving_checks, "device", lambda where=where: where)
        assert serving_checks.outcome(got, [], WANT)[0] == expected


def test_npu_model_has_own_name_and_initializer_range(tmp_path):
    pytest.importorskip("torch", reason="weights are made by torch")
    folder = NpuMLA(layers=1).make(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert folder.name.endswith("-mild")
    assert (config["initializer_range"], config["kv_lora_rank"]) == (0.08, 512)
