"""A chunk that cannot be sent fails its room on both sides, without raising in the scheduler."""

import fake_managers
import numpy as np
import pytest
from fake_managers import BACKENDS, DECODE, ENGINES, PATCHED, PEER, SENDERS, queued_chunks
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import EngineCommonKVSender

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM = 7


def requested_prefill(backend, pages=4, own=None, is_registered=True, kinds=PATCHED):
    """A prefill rank from which a decode rank has requested a room with `pages` pages."""
    prefill = fake_managers.make_manager(backend, own or fake_managers.mla_layout(), kinds=kinds)
    decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    messages = [fake_managers.registration_message(decode)] * is_registered
    fake_managers.process_messages(
        prefill, *messages, fake_managers.metadata_message(decode, ROOM, range(pages))
    )
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    return prefill


def add(prefill, first: int, last: int, is_last: bool = True) -> None:
    pages = np.arange(first, last, dtype=np.int32)
    prefill.add_transfer_request(ROOM, pages, slice(first, last), is_last, aux_index=0)


def assert_failed_on_both_sides(prefill) -> str:
    """Checks that both sides have the room's failure; returns its reason."""
    assert queued_chunks(prefill) == 0
    assert prefill.request_status[ROOM] == KVPoll.Failed
    ((room, status, reason),) = fake_managers.sent_statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert prefill.failure_records[ROOM] == reason
    return reason


@backends
def test_valid_chunks_are_queued(backend):
    prefill = requested_prefill(backend)
    add(prefill, 0, 2, False)
    add(prefill, 2, 4)
    assert queued_chunks(prefill) == 2
    assert not prefill.notified


@backends
def test_incompatible_peer_fails_the_room(backend):
    prefill = requested_prefill(backend, own=fake_managers.mla_layout(layers=3))
    add(prefill, 0, 4)
    reason = assert_failed_on_both_sides(prefill)
    assert reason.startswith("Prefill cannot serve this decode server: ")
    assert "number of layers: prefill has 3, decode has 4" in reason


def test_session_id_with_port_0_fails_the_room():
    """Two decode ranks of a host would share the id: the room would wait for the second one."""
    prefill = fake_managers.make_manager("mooncake", fake_managers.mla_layout())
    decode = fake_managers.make_manager("mooncake", fake_managers.mla_layout(), DECODE)
    decode.engine.session = "127.0.0.1:0"
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    ask = fake_managers.metadata_message(decode, ROOM, range(4), required_dst_info_num=2)
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode), ask, ask)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    add(prefill, 0, 4)
    reason = assert_failed_on_both_sides(prefill)
    assert reason.startswith("Prefill cannot serve this decode server: ")
    assert "decode's session id is 127.0.0.1:0, which has no port" in reason


@backends
def test_unregistered_peer_fails_the_room(backend):
    prefill = requested_prefill(backend, is_registered=False)
    add(prefill, 0, 4)
    assert assert_failed_on_both_sides(prefill) == (
        f"decode {PEER[backend]} requested room {ROOM} and is not registered with this prefill rank"
    )


@backends
def test_unregistered_dcp_peer_fails_the_room(backend):
    """The chunk size depends on the registration, so the engine raises in the scheduler."""
    prefill = requested_prefill(backend, is_registered=False)
    prefill._dcp_pack_max_tokens = 512
    sender = SENDERS[backend](prefill, "127.0.0.1:8998", ROOM)
    with pytest.raises(KeyError):
        EngineCommonKVSender.get_max_transfer_tokens(sender)
    assert sender.get_max_transfer_tokens() == 512
    add(prefill, 0, 4)
    assert "is not registered with this prefill" in assert_failed_on_both_sides(prefill)


@backends
def test_stock_queues_a_chunk_for_an_unregistered_peer(backend):
    """The test does not cover what stock's worker then does with the chunk."""
    prefill = requested_prefill(backend, is_registered=False, kinds=ENGINES)
    add(prefill, 0, 4)
    assert queued_chunks(prefill) == 1


@backends
def test_too_few_decode_pages_fail_the_room(backend):
    prefill = requested_prefill(backend, pages=3)
    add(prefill, 0, 2, False)
    assert prefill.transfer_queues[0].get().room == ROOM
    add(prefill, 2, 4)
    assert "prefill sends 4 pages where decode has set aside 3" in assert_failed_on_both_sides(
        prefill
    )


@backends
def test_stock_queues_a_chunk_with_too_few_decode_pages(backend):
    prefill = requested_prefill(backend, pages=3, kinds=ENGINES)
    add(prefill, 0, 4)
    assert queued_chunks(prefill) == 1


@backends
def test_exception_in_the_engines_code_fails_the_room(backend):
    prefill = requested_prefill(backend)
    prefill.transfer_queues = []
    add(prefill, 0, 4)
    prefill.transfer_queues = [fake_managers.FastQueue()]
    assert assert_failed_on_both_sides(prefill).startswith(
        "Prefill could not send KV: ZeroDivisionError("
    )


@backends
def test_stock_raises_in_the_scheduler(backend):
    prefill = requested_prefill(backend, kinds=ENGINES)
    prefill.transfer_queues = []
    with pytest.raises(ZeroDivisionError):
        add(prefill, 0, 4)


@backends
@pytest.mark.parametrize("is_cleared", [True, False])
def test_finished_room_is_left_to_the_engine(backend, is_cleared):
    """The engine has recorded its own reason, and has notified decode of it."""
    prefill = requested_prefill(backend, pages=3, is_registered=False)
    prefill.record_failure(ROOM, "aborted")
    prefill.update_status(ROOM, KVPoll.Failed)
    if is_cleared:
        for table in (prefill.request_status, prefill.transfer_infos, prefill.failure_records):
            table.pop(ROOM)
    add(prefill, 0, 4)
    assert not prefill.notified
    assert prefill.failure_records == ({} if is_cleared else {ROOM: "aborted"})
    assert ROOM not in prefill.request_status or not is_cleared


@backends
def test_dummy_rank_needs_no_pages(backend):
    """Another prefill rank sends the heads; dummy metadata only lets this one count its peers."""
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    decode = fake_managers.make_manager(backend, fake_managers.mla_layout(), DECODE)
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    ask = decode.build_receiver_metadata_message(
        bootstrap_room=ROOM,
        required_dst_info_num=1,
        kv_indices=np.array([], np.int32),
        aux_index=0,
        state_indices=None,
        decode_prefix_len=0,
        is_dummy=True,
    )
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode), ask)
    add(prefill, 0, 4)
    assert queued_chunks(prefill) == 1
    assert not prefill.notified


@backends
def test_each_chunk_is_recorded_for_its_digests(backend):
    prefill = requested_prefill(backend)
    prefill.kv_args.verifier = object()
    add(prefill, 0, 2, False)
    add(prefill, 2, 4)
    noted = [(where, pages.tolist()) for where, pages in prefill.sent_pages[ROOM].chunks]
    assert noted == [(slice(0, 2), [0, 1]), (slice(2, 4), [2, 3])]


@backends
@pytest.mark.parametrize("status", [KVPoll.Success, KVPoll.Failed])
def test_recorded_chunks_are_dropped_with_their_room(backend, status):
    prefill = requested_prefill(backend)
    prefill.kv_args.verifier = object()
    sender = SENDERS[backend](prefill, "127.0.0.1:8998", ROOM)
    add(prefill, 0, 4)
    assert list(prefill.sent_pages) == [ROOM]
    prefill.update_status(ROOM, status)
    assert sender.poll() == status
    sender.clear()
    add(prefill, 0, 4)  # the room is over
    assert not prefill.sent_pages


@backends
def test_every_decode_rank_of_a_failed_room_is_notified(backend):
    """Two decode ranks request the room; prefill refuses one of them."""
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    for number, layers in enumerate((4, 3)):
        decode = fake_managers.make_manager(
            backend, fake_managers.mla_layout(layers=layers), DECODE
        )
        decode.rank_port += number
        name = f"127.0.0.1:700{number}"
        if backend == "nixl":
            decode.agent.name = name
        else:
            decode.engine.session = name
        ask = fake_managers.metadata_message(decode, ROOM, range(4), required_dst_info_num=2)
        fake_managers.process_messages(prefill, fake_managers.registration_message(decode), ask)
    add(prefill, 0, 4)
    assert {endpoint for endpoint, _ in prefill.notified} == {
        "tcp://127.0.0.1:5555",
        "tcp://127.0.0.1:5556",
    }
    assert {status for _, status, _ in fake_managers.sent_statuses(prefill)} == {KVPoll.Failed}
