"""Memory that cannot be registered: no server starts with it, and none that runs ends of it."""

from types import SimpleNamespace

import pytest
from probes import PickyEngine, by_kind
from sglang.srt.disaggregation.ascend.conn import AscendKVManager
from sglang.srt.disaggregation.ascend.transfer_engine import AscendTransferEngine
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.pd.memory import only_logged_later

pytestmark = pytest.mark.engine

kinds = pytest.mark.parametrize("kind", [AscendKVManager, MooncakeKVManager])


def manager(kind: type, refused: list[int]):
    """A rank with KV of 10 bytes, aux of 30, and no state."""
    made = kind.__new__(kind)
    made.kv_args = SimpleNamespace(
        kv_data_ptrs=[1 << 21],
        kv_data_lens=[10],
        aux_data_ptrs=[3 << 21],
        aux_data_lens=[30],
        state_data_ptrs=by_kind([]),
        state_data_lens=by_kind([]),
        layout=None,
    )
    made.engine = object.__new__(AscendTransferEngine)
    made.engine.engine = PickyEngine(refused, ())
    return made


@kinds
def test_at_start_it_is_raised(kind):
    with pytest.raises(RuntimeError, match=r"KV 0 \(10 bytes"):
        manager(kind, [10]).register_buffer_to_engine()


def levels(caplog) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_at_run_time_it_is_logged(caplog):
    """Such as after a pause in which the memory was given back."""
    running = manager(MooncakeKVManager, [])
    running.register_buffer_to_engine()
    running.engine.engine.refused = {10}
    running.register_buffer_to_engine()
    assert "KV 0 (10 bytes from 0x200000)" in caplog.text
    caplog.clear()
    running.engine.engine.refused = set()
    running.register_buffer_to_engine()
    assert "ERROR" not in levels(caplog)


def test_what_memfabric_still_has_is_no_error(caplog):
    """It cannot unregister; 1.1.4 to 1.2.1 refuse what they have, 1.3.0 does not."""
    running = manager(AscendKVManager, [])
    running.register_buffer_to_engine()
    running.register_buffer_to_engine()
    assert not levels(caplog)
    running.engine.engine.keeps = True
    running.register_buffer_to_engine()
    assert levels(caplog) == ["WARNING"]
    assert "what it registered at the start stays registered" in caplog.text
    assert running.engine.engine.batches == [[10, 30]] * 3  # nothing is tried one by one


@kinds
def test_a_start_that_failed_is_no_start(kind):
    starting = manager(kind, [30])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"aux 0 \(30 bytes"):
            starting.register_buffer_to_engine()


def test_other_errors_are_raised_at_any_time():
    running = SimpleNamespace(has_registered=True)
    with pytest.raises(KeyError), only_logged_later(running):
        raise KeyError("kv")
