"""KV, state and aux are registered; a buffer that cannot be, and is needed, stops the server."""

import probes
import pytest
from of_release import IS_LATER

BACKENDS = ("ascend", "mooncake")
ALL = [10, 20, 30, 40]  # bytes of KV k and v, aux, state
AUX = [30]

pytestmark = pytest.mark.engine
backends = pytest.mark.parametrize("backend", BACKENDS)


def test_on_ascend_one_batch_for_memfabric_to_merge():
    assert probes.registration("ascend", [])["batches"] == [[10, 20, 40, 30]]


def test_with_mooncake_aux_apart():
    assert probes.registration("mooncake", [])["batches"] == [[10, 20, 40], [30]]


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_what_memfabric_does_not_take_together_is_registered_apart(caplog):
    """1.0 merges ranges that touch, and refuses one that lies in two heaps."""
    answer = probes.registration("ascend", [], not_together=[20, 30])
    assert answer == {
        "batches": [[10, 20, 40, 30], [10], [20], [30], [40]],
        "registered": ALL,
        "error": "",
    }
    (warning,) = warnings(caplog)
    assert "4 buffers in one batch, but range by range: all are registered" in warning


def test_what_shares_a_page_is_not_registered_apart():
    """MemFabric looks for the range that begins nearest before an address: one hides another."""
    page = 1 << 21
    shared = [page, 8 * page - 20, 8 * page - 30, 3 * page - 1]
    answer = probes.registration("ascend", [], not_together=[10, 20], addresses=shared)
    assert answer["batches"][1:] == [[10], [40], [30, 20]]
    assert answer["registered"] == ALL


def test_mooncake_takes_them_one_by_one(caplog):
    answer = probes.registration("mooncake", [], not_together=[10, 20])
    assert (answer["registered"], answer["error"]) == (ALL, "")
    (warning,) = warnings(caplog)
    assert "KV and state in one batch (buffers: 3, bytes: 70), but one by one: all" in warning


REFUSED = [
    ([20], "KV and state", "buffers: 3, bytes: 70", "KV v, layer 3 (20 bytes from 0x400000)"),
    ([30], "aux", "buffers: 1, bytes: 30", "aux 0 (30 bytes from 0x600000)"),
    (
        [10, 40],
        "KV and state",
        "buffers: 3, bytes: 70",
        "KV k, layer 3 (10 bytes from 0x200000), state index_k, layer 3 (40 bytes from 0x800000)",
    ),
]


@pytest.mark.parametrize("refused, role, size, named", REFUSED)
def test_failure_names_the_buffers(refused, role, size, named):
    error = probes.registration("mooncake", refused)["error"]
    assert f"one by one it fails for: {named}." in error
    assert f"did not register this rank's {role} in one batch ({size});" in error
    assert error.count("one by one") == 1  # of the other batch nothing is said


@pytest.mark.parametrize("refused, role, size, named", REFUSED)
def test_failure_names_memfabrics_buffers(refused, role, size, named):
    error = probes.registration("ascend", refused)["error"]
    assert f"4 buffers in one batch; range by range it refuses: {named}. Without them" in error


def test_failures_of_kv_and_of_aux_are_told_apart():
    error = probes.registration("mooncake", [20, 30])["error"]
    assert "it fails for: KV v, layer 3 (20 bytes from 0x400000). The transfer engine" in error
    assert "it fails for: aux 0 (30 bytes from 0x600000). " in error


def test_of_a_release_that_refuses_what_it_has_nothing_can_be_told(caplog):
    """The batch has registered the first before it failed, and the other two are taken alone."""
    answer = probes.registration("ascend", [20], keeps=True)
    assert (answer["registered"], answer["error"]) == ([10, 30, 40], "")
    assert "refuses: KV k, layer 3 (10 bytes from 0x200000), KV v, layer 3 (20" in caplog.text
    assert "so that some of them may be" in caplog.text


def test_what_such_a_release_refuses_altogether_stops_the_server():
    assert "KV v, layer 3" in probes.registration("ascend", ALL, keeps=True)["error"]


@backends
def test_what_is_not_described_is_registered_too(backend):
    assert probes.registration(backend, [], state_is_described=False)["registered"] == ALL
    error = probes.registration(backend, [40], state_is_described=False)["error"]
    assert ": state 0 (40 bytes from 0x800000)." in error


@backends
def test_what_is_empty_is_not_registered(backend):
    """Mooncake takes no batch with a buffer of no bytes."""
    answer = probes.registration(backend, [0], state_bytes=0)
    assert (answer["error"], answer["registered"]) == ("", [10, 20, 30])


NO_AUX_BY_THE_ENGINE = [
    {"SGLANG_MOONCAKE_SEND_AUX_TCP": "1"},
    {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK"},
    {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "true"},
]


@backends
@pytest.mark.parametrize("environment", NO_AUX_BY_THE_ENGINE, ids=str)
def test_aux_that_goes_over_tcp_need_not_be_registered(backend, environment, caplog):
    """NVLink transports take no host memory."""
    caplog.set_level("INFO")
    answer = probes.registration(backend, AUX, environment=environment)
    assert (answer["error"], answer["registered"]) == ("", [10, 20, 40])
    assert caplog.text.count("aux goes over TCP") == 1


@backends
@pytest.mark.parametrize("environment", NO_AUX_BY_THE_ENGINE, ids=str)
def test_but_kv_must_be(backend, environment):
    assert "KV v, layer 3" in probes.registration(backend, [20], environment=environment)["error"]


@backends
@pytest.mark.parametrize("pool", ["BAREX", "INTRA_NODE_NVLINK"])
def test_with_other_memory_pools_aux_is_sent_by_the_engine(backend, pool):
    environment = {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": pool}
    assert "aux 0" in probes.registration(backend, AUX, environment=environment)["error"]


@backends
def test_stock_goes_on(backend, stock):
    (answer,) = stock(["registration", backend, [20]])
    assert answer["error"] == ""
    if IS_LATER:
        assert answer["batches"] == [[10, 20, 30, 40]]
    else:
        assert ([40] in answer["batches"]) == (backend == "mooncake")  # Ascend forgets state
