"""A chunk that cannot be sent fails its room on both sides, without raising in the scheduler."""

import fake_managers
import pytest
from engine_release import not_0_5_18
from fake_managers import ENGINES, add_chunk, decode_rank, mla_layout, prefill_rank, queued_chunks
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import EngineCommonKVSender

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7


def requested_prefill(backend, layout=None, pages=4, is_registered=True, **more):
    """A prefill rank from which a decode rank has requested a room with `pages` pages."""
    prefill, decode = prefill_rank(backend, layout, **more), decode_rank(backend)
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    if is_registered:
        fake_managers.register(prefill, decode)
    fake_managers.send_metadata(prefill, decode, ROOM, pages=range(pages))
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    return prefill


def add(prefill, first: int = 0, last: int = 4, is_last: bool = True) -> None:
    add_chunk(prefill, ROOM, range(first, last), first, is_last)


def check_failed_on_both_sides(prefill) -> str:
    """Checks that both sides have the room's failure; returns its reason."""
    assert queued_chunks(prefill) == 0
    assert prefill.request_status[ROOM] == KVPoll.Failed
    ((room, status, reason),) = fake_managers.sent_statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert prefill.failure_records[ROOM] == reason
    return reason


def test_valid_chunks_are_queued(backend):
    prefill = requested_prefill(backend)
    add(prefill, 0, 2, False)
    add(prefill, 2, 4)
    assert queued_chunks(prefill) == 2
    assert not prefill.notified


def test_incompatible_peer_fails_the_room(backend):
    prefill = requested_prefill(backend, mla_layout(layers=3))
    add(prefill)
    reason = check_failed_on_both_sides(prefill)
    assert reason.startswith("Prefill cannot serve this decode server: ")
    assert "number of layers: prefill has 3, decode has 4" in reason


def test_session_id_with_port_0_fails_the_room():
    """Two decode ranks of a host would share the id: the room would wait for the second one."""
    prefill, decode = prefill_rank("mooncake"), decode_rank("mooncake")
    decode.engine.session = "127.0.0.1:0"
    fake_managers.request_rooms(prefill, decode, ROOM, required_dst_info_num=2)
    fake_managers.send_metadata(prefill, decode, ROOM, required_dst_info_num=2)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    add(prefill)
    reason = check_failed_on_both_sides(prefill)
    assert reason.startswith("Prefill cannot serve this decode server: ")
    assert "decode's session id is 127.0.0.1:0, which has no port" in reason


def test_unregistered_peer_fails_the_room(backend):
    prefill = requested_prefill(backend, is_registered=False)
    add(prefill)
    assert prefill.transfer_queues[0].get().room == ROOM
    said = f"requested room {ROOM} and is not registered with this prefill rank"
    peer = fake_managers.PEER[backend]
    assert check_failed_on_both_sides(prefill) == f"decode {peer} {said}"


@not_0_5_18("limits no chunk's tokens in the scheduler")
def test_unregistered_dcp_peer_fails_the_room(backend):
    """The chunk size depends on the registration, so the engine raises in the scheduler."""
    prefill = requested_prefill(backend, is_registered=False)
    prefill._dcp_pack_max_tokens = 512
    sender = fake_managers.new_sender(prefill, ROOM)
    with pytest.raises(KeyError):
        EngineCommonKVSender.get_max_transfer_tokens(sender)
    assert sender.get_max_transfer_tokens() == 512
    add(prefill)
    assert prefill.transfer_queues[0].get().room == ROOM
    assert "is not registered with this prefill" in check_failed_on_both_sides(prefill)


def test_too_few_decode_pages_fail_the_room(backend):
    prefill = requested_prefill(backend, pages=3)
    add(prefill, 0, 2, False)
    assert prefill.transfer_queues[0].get().room == ROOM
    add(prefill, 2, 4)
    reason = check_failed_on_both_sides(prefill)
    assert "prefill sends 4 pages where decode has set aside 3" in reason


@pytest.mark.parametrize("case", [{"is_registered": False}, {"pages": 3}], ids=str)
def test_stock_queues_a_chunk_that_cannot_be_sent(case, backend):
    """The test does not cover what stock's worker then does with the chunk."""
    prefill = requested_prefill(backend, kinds=ENGINES, **case)
    add(prefill)
    assert queued_chunks(prefill) == 1


def test_exception_in_the_engines_code_fails_the_room(backend):
    prefill = requested_prefill(backend)
    prefill.transfer_queues = []
    add(prefill)
    prefill.transfer_queues = [fake_managers.FastQueue()]
    reason = check_failed_on_both_sides(prefill)
    assert reason.startswith("Prefill could not send KV: ZeroDivisionError(")


def test_stock_raises_in_the_scheduler(backend):
    prefill = requested_prefill(backend, kinds=ENGINES)
    prefill.transfer_queues = []
    with pytest.raises(ZeroDivisionError):
        add(prefill)


@pytest.mark.parametrize("is_cleared", [True, False])
def test_finished_room_is_left_to_the_engine(is_cleared, backend):
    """The engine has recorded its own reason, and has notified decode of it."""
    prefill = requested_prefill(backend, pages=3, is_registered=False)
    prefill.record_failure(ROOM, "aborted")
    prefill.update_status(ROOM, KVPoll.Failed)
    if is_cleared:
        for table in (prefill.request_status, prefill.transfer_infos, prefill.failure_records):
            table.pop(ROOM)
    add(prefill)
    assert not prefill.notified
    assert prefill.failure_records == ({} if is_cleared else {ROOM: "aborted"})
    assert ROOM not in prefill.request_status or not is_cleared


def pages_sent_to_a_reused_room(backend, **more) -> set[int]:
    """Queues pages 0 to 3 of a request that then fails, and 8 to 11 of the next with its room.

    Returns the pages that a worker sends.
    """
    prefill = requested_prefill(backend, **more)
    add_chunk(prefill, ROOM, range(4), is_last=False)
    for table in (prefill.request_status, prefill.transfer_infos):
        table.pop(ROOM)
    fake_managers.request_rooms(prefill, decode_rank(backend), ROOM)
    add_chunk(prefill, ROOM, range(8, 12))
    fake_managers.run_worker(prefill)
    assert prefill.request_status[ROOM] == KVPoll.Success
    first, size = prefill.kv_args.kv_data_ptrs[0], prefill.kv_args.kv_item_lens[0]
    sent = [(src - first, length) for src, _, length in fake_managers.posted_copies(prefill)]
    pages = range(fake_managers.PAGES)
    return {n for at, length in sent for n in pages if at <= n * size < at + length}


def test_queued_chunk_of_a_failed_request_is_not_sent_for_the_next_of_its_room(backend):
    assert pages_sent_to_a_reused_room(backend) == {8, 9, 10, 11}


def test_stock_sends_it_for_the_next():
    """Only over Mooncake here: NIXL's fake agent lacks what the engine's own lists need."""
    assert pages_sent_to_a_reused_room("mooncake", kinds=ENGINES) > {0, 1, 2, 3}


def test_dummy_rank_needs_no_pages(backend, prefill, decode):
    """Another prefill rank sends the heads; dummy metadata only lets this one count its peers."""
    dummy = {"pages": [], "is_dummy": True, "decode_prefix_len": 0}
    fake_managers.request_rooms(prefill, decode, ROOM, **dummy)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    assert prefill.transfer_infos[ROOM][fake_managers.PEER[backend]].is_dummy
    add(prefill)
    assert queued_chunks(prefill) == 1
    assert not prefill.notified


def test_each_chunk_is_recorded_for_its_digests(backend):
    prefill = requested_prefill(backend)
    prefill.kv_args.verifier = object()
    add(prefill, 0, 2, False)
    add(prefill, 2, 4)
    noted = [(where, pages.tolist()) for where, pages in prefill.sent_pages[ROOM].chunks]
    assert noted == [(slice(0, 2), [0, 1]), (slice(2, 4), [2, 3])]


@pytest.mark.parametrize("status", [KVPoll.Success, KVPoll.Failed])
def test_recorded_chunks_are_dropped_with_their_room(status, backend):
    prefill = requested_prefill(backend)
    prefill.kv_args.verifier = object()
    sender = fake_managers.new_sender(prefill, ROOM)
    add(prefill)
    assert list(prefill.sent_pages) == [ROOM]
    prefill.update_status(ROOM, status)
    assert sender.poll() == status
    sender.clear()
    add(prefill)  # the room is over
    assert not prefill.sent_pages


def test_every_decode_rank_of_a_failed_room_is_notified(prefill, backend):
    """Two decode ranks request the room; prefill refuses one of them."""
    for number, layers in enumerate((4, 3)):
        decode = decode_rank(backend, mla_layout(layers=layers), number)
        fake_managers.request_rooms(prefill, decode, ROOM, required_dst_info_num=2)
    add(prefill)
    assert {endpoint for endpoint, _ in prefill.notified} == {
        "tcp://127.0.0.1:5555",
        "tcp://127.0.0.1:5556",
    }
    assert {status for _, status, _ in fake_managers.sent_statuses(prefill)} == {KVPoll.Failed}
