"""Decode keeps the pages of a failed request, also if HiCache could not restore its prefix."""

from types import SimpleNamespace

import fakes_0_5_18
import pytest
from fake_managers import RECEIVERS, finish_failed
from sglang.srt.disaggregation import decode_hicache_mixin as hicache
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.held_pages import RELEASE_VARIABLE
from sglang.srt.disaggregation.utils import setup_state_kv_args

pytestmark = pytest.mark.engine

ROOM, ADDRESS = 7, "127.0.0.1:8998"
FAILED, READY = hicache.HiCacheRestoreResult.FAILED, hicache.HiCacheRestoreResult.READY


def restore(monkeypatch, request, outcome) -> None:
    """Lets the engine restore the request's prefix, with this outcome."""
    engine = hicache.EngineDecodeHiCacheTransferMixin

    def process(self, requests):
        for one in requests:
            one.hicache_restore_status = outcome

    monkeypatch.setattr(engine, "_process_hicache_local_restores", process)
    hicache.DecodeHiCacheTransferMixin()._process_hicache_local_restores([request])


def test_prefix_that_cannot_be_restored_aborts_the_request(backend, decode, monkeypatch):
    """The engine frees its pages at once, on this rank only, while prefill writes to them."""
    receiver = RECEIVERS[backend](decode, ADDRESS, ROOM)
    receiver.bootstrap_infos, receiver.is_requested = [dict(fakes_0_5_18.RANK)], True
    receiver.requested = tuple(receiver.bootstrap_infos)
    request = SimpleNamespace(kv_receiver=receiver)
    with fakes_0_5_18.recorded_messages() as sent:
        restore(monkeypatch, request, FAILED)
    assert [frames[0] for frames in sent] == [b"ABORT"]
    assert request.hicache_restore_status == READY  # or the engine would free the pages
    assert receiver.is_held()
    assert "HiCache" in finish_failed(receiver)


def test_restored_prefix_leaves_the_request_open(backend, decode, monkeypatch):
    receiver = RECEIVERS[backend](decode, ADDRESS, ROOM)
    request = SimpleNamespace(kv_receiver=receiver)
    restore(monkeypatch, request, READY)
    assert receiver.poll() == KVPoll.Bootstrapping


def test_wrong_variable_stops_the_server_at_its_start(monkeypatch):
    """Otherwise the scheduler would end at the first request that fails."""
    monkeypatch.setenv(RELEASE_VARIABLE, "soon")
    with pytest.raises(ValueError, match=RELEASE_VARIABLE):
        setup_state_kv_args(SimpleNamespace(), None, None, 1)
