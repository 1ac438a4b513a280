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


def test_what_memfabric_does_not_take_together_is_registered_apart(caplog):
    """It merges ranges that touch, and refuses one that lies in two heaps."""
    answer = probes.registration("ascend", [], not_together=[20, 30])
    assert answer == {
        "batches": [[10, 20, 40, 30], [10, 20, 40], [30]],
        "registered": ALL,
        "error": "",
    }
    assert "did not register KV, state and aux in one batch" in caplog.text


@backends
@pytest.mark.parametrize(
    "refused, role, size, named",
    [
        ([20], "KV and state", "buffers: 3, bytes: 70", "KV v, layer 3 (20 bytes)"),
        ([30], "aux", "buffers: 1, bytes: 30", "aux 0 (30 bytes)"),
        (
            [10, 40],
            "KV and state",
            "buffers: 3, bytes: 70",
            "KV k, layer 3 (10 bytes), state index_k, layer 3 (40 bytes)",
        ),
    ],
)
def test_failure_names_the_buffers(backend, refused, role, size, named):
    error = probes.registration(backend, refused)["error"]
    assert f"one by one it fails for: {named}." in error
    assert f"did not register this rank's {role} in one batch ({size});" in error
    assert error.count("one by one") == 1  # of the other batch nothing is said


@backends
def test_failures_of_kv_and_of_aux_are_told_apart(backend):
    error = probes.registration(backend, [20, 30])["error"]
    assert "it fails for: KV v, layer 3 (20 bytes). The transfer engine" in error
    assert "it fails for: aux 0 (30 bytes). " in error


@backends
def test_what_is_not_described_is_registered_too(backend):
    assert probes.registration(backend, [], state_is_described=False)["registered"] == ALL
    error = probes.registration(backend, [40], state_is_described=False)["error"]
    assert "it fails for: state 0 (40 bytes)." in error


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
