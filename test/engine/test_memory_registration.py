"""Registration of KV, state and aux: the server stops if a needed buffer cannot be registered."""

import pytest
from engine_calls import registration
from engine_release import SINCE_0_5_18

ALL = [10, 20, 30, 40]  # bytes of KV k and v, aux, state
AUX = [30]

pytestmark = pytest.mark.engine
backends = pytest.mark.parametrize("backend", ["ascend", "mooncake"])


@pytest.mark.parametrize(
    "backend, batches", [("ascend", [[10, 20, 40, 30]]), ("mooncake", [[10, 20, 40], [30]])]
)
def test_only_mooncake_registers_aux_in_a_batch_of_its_own(backend, batches):
    assert registration(backend, [])["batches"] == batches


def warnings(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_ascend_falls_back_to_registering_range_by_range(caplog):
    """MemFabric 1.0 merges adjacent ranges, and refuses a range that lies in two heaps."""
    answer = registration("ascend", [], refused_together=[20, 30])
    assert answer == {
        "batches": [[10, 20, 40, 30], [10], [20], [30], [40]],
        "registered": ALL,
        "error": "",
        "packs": False,
    }
    (warning,) = warnings(caplog)
    assert "4 buffers in one batch, but registered all of them range by range" in warning


def test_ranges_that_share_a_page_are_registered_together():
    """MemFabric looks up the last range that begins before an address: one may hide another."""
    page = 1 << 21
    shared = [page, 8 * page - 20, 8 * page - 30, 3 * page - 1]
    answer = registration("ascend", [], refused_together=[10, 20], addresses=shared)
    assert answer["batches"][1:] == [[10], [40], [30, 20]]
    assert answer["registered"] == ALL


@backends
def test_packing_buffer_is_registered(backend):
    answer = registration(backend, [], packing_bytes=50)
    assert (answer["registered"], answer["error"], answer["packs"]) == ([*ALL, 50], "", True)


@backends
def test_rank_whose_packing_buffer_is_refused_sends_slices(backend, caplog):
    """Its server starts: slices do not need this memory."""
    answer = registration(backend, [50], packing_bytes=50)
    assert (answer["registered"], answer["error"], answer["packs"]) == (ALL, "", False)
    assert "did not register the 50 bytes in which KV heads are packed" in warnings(caplog)[0]


def test_mooncake_falls_back_to_registering_one_by_one(caplog):
    answer = registration("mooncake", [], refused_together=[10, 20])
    assert (answer["registered"], answer["error"]) == (ALL, "")
    (warning,) = warnings(caplog)
    assert "KV and state in one batch (buffers: 3, bytes: 70), but registered all of" in warning


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
    error = registration("mooncake", refused)["error"]
    assert f"one by one, it could not register: {named}." in error
    assert f"did not register this rank's {role} in one batch ({size});" in error
    assert error.count("one by one") == 1  # nothing about the other batch
    error = registration("ascend", refused)["error"]
    assert f"4 buffers in one batch; range by range, it rejects: {named}. Without them" in error


def test_failures_of_kv_and_aux_are_reported_separately():
    error = registration("mooncake", [20, 30])["error"]
    assert "not register: KV v, layer 3 (20 bytes from 0x400000). The transfer engine" in error
    assert "not register: aux 0 (30 bytes from 0x600000). " in error


def test_refusal_of_registered_ranges_by_memfabric_is_only_logged(caplog):
    """The batch registered the first buffer before it failed; two others register one by one."""
    answer = registration("ascend", [20], keeps=True)
    assert (answer["registered"], answer["error"]) == ([10, 30, 40], "")
    assert "rejects: KV k, layer 3 (10 bytes from 0x200000), KV v, layer 3 (20" in caplog.text
    assert "so some of these may be registered" in caplog.text


def test_refusal_of_every_range_stops_the_server():
    assert "KV v, layer 3" in registration("ascend", ALL, keeps=True)["error"]


@backends
def test_undescribed_state_is_registered(backend):
    assert registration(backend, [], state_is_described=False)["registered"] == ALL
    error = registration(backend, [40], state_is_described=False)["error"]
    assert ": state 0 (40 bytes from 0x800000)." in error


@backends
def test_empty_buffers_are_not_registered(backend):
    """Mooncake refuses a batch with an empty buffer."""
    answer = registration(backend, [0], state_bytes=0)
    assert (answer["error"], answer["registered"]) == ("", [10, 20, 30])


@backends
@pytest.mark.parametrize(
    "environment",
    [
        {"SGLANG_MOONCAKE_SEND_AUX_TCP": "1"},
        {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK"},
        {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "true"},
    ],
    ids=str,
)
def test_aux_sent_over_tcp_need_not_be_registered(backend, environment, caplog):
    """NVLink transports cannot register host memory; KV must be registered all the same."""
    caplog.set_level("INFO")
    answer = registration(backend, AUX, environment=environment)
    assert (answer["error"], answer["registered"]) == ("", [10, 20, 40])
    assert caplog.text.count("aux is sent over TCP") == 1
    error = registration(backend, [20], environment=environment)["error"]
    assert "KV v, layer 3" in error


@backends
@pytest.mark.parametrize("pool", ["BAREX", "INTRA_NODE_NVLINK"])
def test_aux_must_be_registered_with_other_memory_pools(backend, pool):
    environment = {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": pool}
    assert "aux 0" in registration(backend, AUX, environment=environment)["error"]


@backends
def test_stock_ignores_failed_registration(backend, stock):
    (answer,) = stock(["registration", backend, [20]])
    assert answer["error"] == ""
    if SINCE_0_5_18:
        assert answer["batches"] == [[10, 20, 30, 40]]
    else:
        assert ([40] in answer["batches"]) == (backend == "mooncake")  # Ascend omits state
