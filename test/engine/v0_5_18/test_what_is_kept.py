"""Nothing is kept for each request, or for each decode rank that is gone."""

import fake_managers
import pytest
from fake_managers import ENDPOINT, RECEIVERS, add_chunk, decode_rank, register
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd import room_conclusions

pytestmark = pytest.mark.engine

ROOM, ADDRESS = 7, "127.0.0.1:8998"


def test_rooms_of_a_prefill_server_are_forgotten_when_they_end(backend, decode):
    receivers = [RECEIVERS[backend](decode, ADDRESS, room) for room in (ROOM, ROOM + 1)]
    receivers[0].clear()
    assert decode.addr_to_rooms_tracker == {ADDRESS: {ROOM + 1}}


def test_room_that_has_another_request_is_not_forgotten(backend, decode):
    receiver = RECEIVERS[backend](decode, ADDRESS, ROOM)
    receiver.clear()
    RECEIVERS[backend](decode, ADDRESS, ROOM)
    receiver.clear()
    assert decode.addr_to_rooms_tracker == {ADDRESS: {ROOM}}


@pytest.mark.parametrize("backend", ["nixl"], indirect=True)
def test_exception_of_a_failed_room_is_not_kept(prefill, decode):
    """Its traceback has the lists of what was being written, and NIXL's transfers."""

    def fail(handle):
        raise RuntimeError("NIXL_ERR_BACKEND")

    prefill.agent.agent.transfer, prefill.transfer_source_rank = fail, 0
    fake_managers.request_rooms(prefill, decode, ROOM)
    add_chunk(prefill, ROOM)
    fake_managers.run_worker(prefill)
    assert prefill.request_status == {ROOM: KVPoll.Failed}
    assert prefill.failure_records == {ROOM: "NIXL_ERR_BACKEND"}
    assert not prefill.exceptions


def drop(prefill) -> None:
    """Drops the decode rank that registered first, as after a long silence."""
    name, info = next(iter(prefill.decode_kv_args_table.items()))
    prefill.watched_peers[name] = info
    prefill._drop_silent_peer(name)


def other_rank(backend: str):
    other = decode_rank(backend, number=1)
    if backend == "nixl":
        other.agent.agent.name = other.agent.name  # which is in the agent's metadata
    return other


@pytest.mark.parametrize("is_dropped", [True, False])
def test_endpoints_of_dropped_decode_ranks_are_forgotten_in_time(
    is_dropped, backend, prefill, decode, monkeypatch
):
    """A rank that comes back without registering is to be told that its requests fail."""
    monkeypatch.setattr(room_conclusions, "MAX_STATUS_READERS", 1)
    register(prefill, decode)
    if is_dropped:
        drop(prefill)
    assert prefill.status_readers == {ENDPOINT}
    other = other_rank(backend)
    register(prefill, other)
    second = (ENDPOINT[0], other.rank_port)
    assert prefill.status_readers == ({second} if is_dropped else {ENDPOINT, second})


def test_stock_rank_at_the_endpoint_of_another_gets_no_status_messages(backend, prefill, decode):
    """They would end its thread that reads messages."""
    register(prefill, decode)
    stock = other_rank(backend)
    stock.rank_port = decode.rank_port
    register(prefill, stock, is_described=False)
    assert not prefill.status_readers
