"""Decode keeps a failed request's pages until prefill acknowledges that it writes no more."""

import time
from concurrent.futures import ThreadPoolExecutor

import fake_managers
import fakes_0_5_18
import numpy as np
import pytest
from fake_managers import ENDPOINT, RECEIVERS, add_chunk, process_messages, request_rooms
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd import held_pages
from sglang.srt.disaggregation.pd.held_pages import ACK, ack_message
from sglang.srt.disaggregation.pd.room_failures import ABORT, abort_message, parse_abort
from sglang.srt.disaggregation.utils import poll_and_all_reduce

pytestmark = pytest.mark.engine

ROOM, ADDRESS = 7, "127.0.0.1:8998"
RANKS = [{**fakes_0_5_18.RANK, "rank_port": number} for number in (1, 2)]


# Decode


@pytest.fixture
def sent():
    """What receivers send to prefill ranks."""
    with fakes_0_5_18.recorded_messages() as messages:
        yield messages


def failed_receiver(decode, backend: str, is_requested: bool = True):
    """The receiver of a request that has failed, and for which two prefill ranks may write."""
    receiver = RECEIVERS[backend](decode, ADDRESS, ROOM)
    receiver.bootstrap_infos, receiver.is_requested = [dict(rank) for rank in RANKS], is_requested
    receiver.requested = tuple(receiver.bootstrap_infos) if is_requested else ()
    decode.update_status(ROOM, KVPoll.Failed)
    assert receiver.poll() == KVPoll.Failed
    return receiver


@pytest.fixture
def receiver(backend, decode, sent):
    return failed_receiver(decode, backend)


def acknowledge(decode, *ranks: int, generation: int | None = None) -> None:
    """Lets a decode rank read the acknowledgements of prefill ranks, by default of this abort."""
    if generation is None:
        generation, _ = decode.acks.rooms[ROOM]
    process_messages(decode, *(ack_message(ROOM, rank, generation) for rank in ranks))


def test_pages_are_held_until_all_prefill_ranks_acknowledge(receiver, decode, sent):
    assert receiver.is_held() and receiver.is_held()
    assert [parse_abort(frames)[:2] for frames in sent] == [(ROOM, ENDPOINT)] * len(RANKS)  # once
    acknowledge(decode, 0, 0)
    assert receiver.is_held()
    acknowledge(decode, 1)
    assert not receiver.is_held()


def test_acknowledgement_of_an_earlier_abort_does_not_count(receiver, decode, backend):
    assert receiver.is_held()
    earlier, _ = decode.acks.rooms[ROOM]
    receiver.clear()
    following = failed_receiver(decode, backend)
    assert following.is_held()
    acknowledge(decode, 0, 1, generation=earlier)
    assert following.is_held()
    acknowledge(decode, 0, 1)
    assert not following.is_held()


def test_acknowledgement_of_a_stock_rank_does_not_count(receiver, decode):
    """It does not wait for its writes."""
    assert receiver.is_held()
    process_messages(decode, [ACK, b"%d" % ROOM], [ACK, b"%d" % ROOM])
    assert receiver.is_held()


def test_pages_are_not_held_for_ever(receiver, decode, monkeypatch, caplog):
    assert receiver.is_held()
    now = time.monotonic()
    monkeypatch.setattr(held_pages.time, "monotonic", lambda: now + decode.release_seconds + 1)
    assert not receiver.is_held()
    assert held_pages.RELEASE_VARIABLE in caplog.text


def poll(receiver) -> KVPoll:
    """What all TP ranks agree on; the test has replaced their exchange."""
    (state,) = poll_and_all_reduce([receiver], None)
    return state


def test_failed_request_is_transferring_while_its_pages_are_held(receiver, decode, monkeypatch):
    monkeypatch.setattr(held_pages.dist, "all_reduce", lambda *given, **options: None)
    assert poll(receiver) == poll(receiver) == KVPoll.Transferring
    acknowledge(decode, 0, 1)
    assert poll(receiver) == KVPoll.Failed


def test_pages_are_held_as_long_as_on_any_tp_rank(receiver, decode, monkeypatch):
    def another_rank_holds(votes, op, **options) -> None:
        if op == held_pages.dist.ReduceOp.MAX:
            votes.fill_(1)

    monkeypatch.setattr(held_pages.dist, "all_reduce", another_rank_holds)
    assert receiver.is_held()
    acknowledge(decode, 0, 1)
    assert poll(receiver) == KVPoll.Transferring


def test_request_of_which_prefill_knows_nothing_holds_no_pages(backend, decode, sent):
    assert not failed_receiver(decode, backend, is_requested=False).is_held()
    assert not sent


@pytest.mark.parametrize("silent", [1, 2])
def test_rank_that_was_not_asked_for_the_room_is_not_awaited(silent, backend, decode, sent):
    """The engine asks rank after rank, and stops at a silent one; each is to forget the room."""
    decode.is_silent = lambda rank: rank["rank_port"] == silent
    decode.update_status(ROOM, KVPoll.Bootstrapping)
    receiver = fakes_0_5_18.receiver_of(decode, RECEIVERS[backend], ROOM)
    receiver.bootstrap_infos = [dict(rank) for rank in RANKS]
    receiver.send_metadata(np.array([1], np.int32), 0, None)
    assert receiver.poll() == KVPoll.Failed
    assert receiver.is_held() == (silent == 2)
    generation, _ = decode.acks.rooms[ROOM]
    awaited = [(ROOM, ENDPOINT, generation)] if silent == 2 else [(ROOM, ENDPOINT, None)]
    aborts = [parse_abort(frames) for frames in sent if frames[0] == ABORT]
    assert aborts == [*awaited, (ROOM, ENDPOINT, None)]
    acknowledge(decode, 0)
    assert not receiver.is_held()


def test_nothing_is_kept_of_a_cleared_request(receiver, decode):
    assert receiver.is_held() and decode.acks.rooms
    receiver.clear()
    assert not receiver.is_held() and not decode.acks.rooms


# Prefill


@pytest.fixture
def requested(prefill, decode):
    """A prefill rank from which a decode rank has requested the room."""
    request_rooms(prefill, decode, ROOM)
    return prefill


def abort(prefill, generation: int = 3) -> None:
    prefill._handle_abort_notification(abort_message(ROOM, ENDPOINT, generation))


def acknowledged(prefill) -> list[list[bytes]]:
    """The acknowledgements that were sent since the last call."""
    found = [frames for _, frames in prefill.notified if frames[0] == ACK]
    prefill.notified.clear()
    return found


def test_abort_is_acknowledged_at_once_if_nothing_is_written(requested):
    abort(requested)
    assert acknowledged(requested) == [ack_message(ROOM, 0, 3)]
    assert requested.request_status[ROOM] == KVPoll.Failed
    assert not requested.ack_targets and not requested.writing


def test_abort_is_acknowledged_once_the_workers_chunk_is_over(backend, requested):
    """The abort arrives while the worker writes; another thread reads it."""
    seen = []

    def write(*given):
        with ThreadPoolExecutor(1) as reader:
            reader.submit(abort, requested).result()
        seen.append(acknowledged(requested))
        return "DONE" if backend == "nixl" else 0

    library = requested.agent.agent if backend == "nixl" else requested.engine
    setattr(library, "transfer" if backend == "nixl" else "batch_transfer_sync", write)
    add_chunk(requested, ROOM)
    fake_managers.run_worker(requested)
    assert seen and not any(seen)
    assert acknowledged(requested) == [ack_message(ROOM, 0, 3)]
    assert not requested.ack_targets and not requested.writing


def test_abort_of_a_poisoned_room_is_not_acknowledged(requested):
    """Writes to it may go on, and nobody sees when they end."""
    requested.poison_deferred_ack_room(ROOM)
    abort(requested)
    assert not acknowledged(requested)


@pytest.mark.parametrize("number", [b"x", b"", b"\xff", b"9" * 5000], ids=lambda one: str(one[:4]))
def test_abort_with_an_invalid_number_is_not_acknowledged(number, requested):
    """It must not end the thread that reads messages: the next abort is acknowledged."""
    process_messages(requested, [*abort_message(ROOM, ENDPOINT), number])
    assert not acknowledged(requested)
    assert requested.request_status[ROOM] == KVPoll.Failed
    process_messages(requested, abort_message(ROOM, ENDPOINT, 3))
    assert acknowledged(requested) == [ack_message(ROOM, 0, 3)]


def test_abort_of_a_stock_decode_rank_is_not_acknowledged(requested):
    """It frees its pages at once, and would not read the message."""
    process_messages(requested, abort_message(ROOM, ENDPOINT))
    assert not acknowledged(requested)
    assert requested.request_status[ROOM] == KVPoll.Failed
