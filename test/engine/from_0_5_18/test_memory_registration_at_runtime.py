"""A failed memory registration stops a server at startup, but not one that runs."""

from types import SimpleNamespace

import pytest
from engine_calls import RefusingEngine, by_kind
from sglang.srt.disaggregation.ascend.conn import AscendKVManager
from sglang.srt.disaggregation.ascend.transfer_engine import AscendTransferEngine
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.pd.memory_registration import raise_only_at_startup
from sglang.srt.disaggregation.utils import DisaggregationMode

pytestmark = pytest.mark.engine

kinds = pytest.mark.parametrize("kind", [AscendKVManager, MooncakeKVManager])


def make_manager(kind: type, refused: list[int], packing=None):
    """A prefill rank with KV of 10 bytes, aux of 30, and no state."""
    made = kind.__new__(kind)
    made.disaggregation_mode = DisaggregationMode.PREFILL
    made.kv_args = SimpleNamespace(
        kv_data_ptrs=[1 << 21],
        kv_data_lens=[10],
        aux_data_ptrs=[3 << 21],
        aux_data_lens=[30],
        state_data_ptrs=by_kind([]),
        state_data_lens=by_kind([]),
        layout=None,
        views=None,
        packing=packing,
    )
    made.engine = object.__new__(AscendTransferEngine)
    made.engine.engine = RefusingEngine(refused, ())
    return made


@kinds
@pytest.mark.parametrize("refused, name", [(10, r"KV 0 \(10 bytes"), (30, r"aux 0 \(30 bytes")])
def test_registration_error_is_raised_at_startup(refused, name, kind):
    """A failed startup does not count as registered."""
    starting = make_manager(kind, [refused])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=name):
            starting.register_buffer_to_engine()


@kinds
def test_memory_to_pack_in_is_registered(kind, caplog):
    """If it is refused, the rank sends slices."""
    packing = SimpleNamespace(region=("packing buffer", 5 << 21, 50))
    starting = make_manager(kind, [], packing)
    starting.register_buffer_to_engine()
    assert sorted(starting.engine.engine.registered) == [10, 30, 50]
    assert starting.packing is packing
    refused = make_manager(kind, [50], packing)
    refused.register_buffer_to_engine()
    assert refused.packing is None
    assert "did not register the 50 bytes in which KV heads are packed" in caplog.text


def log_levels(caplog) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_registration_error_is_logged_at_runtime(caplog):
    """A server may register again after a pause during which it released its memory."""
    running = make_manager(MooncakeKVManager, [])
    running.register_buffer_to_engine()
    running.engine.engine.refused = {10}
    running.register_buffer_to_engine()
    assert "KV 0 (10 bytes from 0x200000)" in caplog.text
    caplog.clear()
    running.engine.engine.refused = set()
    running.register_buffer_to_engine()
    assert "ERROR" not in log_levels(caplog)


def test_memory_still_registered_with_memfabric_is_only_a_warning(caplog):
    """MemFabric cannot unregister; 1.1.4 to 1.2.1 refuse registered memory, 1.3.0 does not."""
    running = make_manager(AscendKVManager, [])
    running.register_buffer_to_engine()
    running.register_buffer_to_engine()
    assert not log_levels(caplog)
    running.engine.engine.keeps = True
    running.register_buffer_to_engine()
    assert log_levels(caplog) == ["WARNING"]
    assert "those registered at the start stay registered" in caplog.text
    assert running.engine.engine.batches == [[10, 30]] * 3  # no buffer is tried alone


def test_other_errors_are_raised_at_runtime():
    running = SimpleNamespace(has_registered=True)
    with pytest.raises(KeyError), raise_only_at_startup(running):
        raise KeyError("kv")
