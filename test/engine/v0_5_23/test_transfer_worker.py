"""Mooncake's transfer worker: an error in a chunk fails its room, and no other."""

import time
from concurrent.futures import ThreadPoolExecutor

import fake_managers
import numpy as np
import pytest
from fake_managers import DECODE, ENGINES, PATCHED, PEER
from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import ABORT_TAG
from sglang.srt.disaggregation.pd import back_off

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

BROKEN, GOOD, LATER = 7, 8, 9
NO_PAGE = fake_managers.PAGES + 900


def requested_prefill(kinds=PATCHED, rooms=(BROKEN, GOOD)):
    """A prefill rank from which a decode rank has requested these rooms."""
    prefill = fake_managers.make_manager("mooncake", fake_managers.mla_layout(), kinds=kinds)
    decode = fake_managers.make_manager("mooncake", fake_managers.mla_layout(), DECODE)
    for room in rooms:
        prefill.request_status[room] = KVPoll.Bootstrapping
    requests = [fake_managers.metadata_message(decode, room, range(4)) for room in rooms]
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode), *requests)
    return prefill


def add(prefill, room: int, pages=(0, 1, 2, 3), is_last=True) -> None:
    numbers = np.array(pages, dtype=np.int32)
    prefill.add_transfer_request(room, numbers, slice(0, len(pages)), is_last, aux_index=0)


def run_worker(prefill) -> None:
    """Runs the worker until its server stops; raises what would crash its thread."""
    (queue,) = prefill.transfer_queues
    queue.put(None)
    with ThreadPoolExecutor(1) as executor:
        prefill.transfer_worker(queue, executor)
    assert not fake_managers.queued_chunks(prefill)


def raise_once(prefill, error: Exception, name: str = "send_kvcache") -> None:
    """Makes the method's first call raise `error`."""
    send = getattr(prefill, name)
    left = [error]

    def sent(*args, **options):
        if left:
            raise left.pop()
        return send(*args, **options)

    setattr(prefill, name, sent)


def sent_statuses(prefill) -> dict[int, tuple[int, str]]:
    found = fake_managers.sent_statuses(prefill)
    assert len(found) == len({room for room, *_ in found})
    return {room: (status, reason) for room, status, reason in found}


def abort(prefill, room: int) -> bool:
    """Aborts the room as decode; returns whether prefill acknowledges that no write is left."""
    prefill.notified.clear()
    prefill._handle_abort_notification([ABORT_TAG, b"%d" % room, b"127.0.0.1", b"5555", b"3"])
    return [frames for _, frames in prefill.notified] == [[b"ABORT_ACK", b"%d" % room, b"0", b"3"]]


def test_valid_chunks_succeed():
    prefill = requested_prefill()
    add(prefill, BROKEN)
    add(prefill, GOOD)
    run_worker(prefill)
    assert sent_statuses(prefill) == dict.fromkeys((BROKEN, GOOD), (KVPoll.Success, None))


@pytest.mark.parametrize(
    "name, is_last", [("send_kvcache", True), ("send_kvcache", False), ("send_aux", True)]
)
def test_exception_fails_its_room(name, is_last):
    prefill = requested_prefill()
    raise_once(prefill, OSError("no memory"), name)
    add(prefill, BROKEN, is_last=is_last)
    run_worker(prefill)
    reason = "Prefill could not send KV: no memory"
    assert sent_statuses(prefill) == {BROKEN: (KVPoll.Failed, reason)}
    assert prefill.request_status[BROKEN] == KVPoll.Failed
    assert prefill.failure_records == {BROKEN: reason}
    assert BROKEN not in prefill._staging_outstanding


def test_worker_continues_after_an_exception():
    prefill = requested_prefill()
    raise_once(prefill, OSError("no memory"))
    add(prefill, BROKEN, is_last=False)
    add(prefill, BROKEN)  # skipped, as its room has failed by then
    add(prefill, GOOD)
    run_worker(prefill)
    assert {room: status for room, (status, _) in sent_statuses(prefill).items()} == {
        BROKEN: KVPoll.Failed,
        GOOD: KVPoll.Success,
    }
    assert not prefill._staging_outstanding


def test_stock_worker_crashes_on_an_exception():
    prefill = requested_prefill(ENGINES)
    raise_once(prefill, OSError("no memory"))
    add(prefill, BROKEN)
    add(prefill, GOOD)
    with pytest.raises(RuntimeError, match="Transfer thread failed because of no memory"):
        run_worker(prefill)
    assert not prefill.notified


def test_no_abort_ack_after_an_exception():
    """A write may still be running."""
    prefill = requested_prefill()
    raise_once(prefill, OSError("no memory"))
    add(prefill, BROKEN)
    run_worker(prefill)
    assert not abort(prefill, BROKEN)


def test_abort_ack_after_pages_out_of_range():
    """No write has begun."""
    prefill = requested_prefill()
    add(prefill, BROKEN, pages=(0, NO_PAGE))
    run_worker(prefill)
    assert not fake_managers.posted_copies(prefill)
    status, reason = sent_statuses(prefill)[BROKEN]
    assert status == KVPoll.Failed and str(NO_PAGE) in reason
    assert abort(prefill, BROKEN)


def test_worker_stops_with_its_server():
    prefill = requested_prefill()
    run_worker(prefill)
    assert not prefill.notified


def fail_transfers(prefill, tries: int) -> None:
    """Makes the next `tries` calls of the transfer engine fail."""
    write, left = prefill.engine.batch_transfer_sync, [-1] * tries

    def transfer(*lists):
        return left.pop() if left else write(*lists)

    prefill.engine.batch_transfer_sync = transfer


def test_failed_session_is_retried_soon(monkeypatch):
    monkeypatch.setattr(back_off, "BACK_OFF_SECONDS", 0.3)
    prefill = requested_prefill(rooms=(BROKEN, GOOD, LATER))
    fail_transfers(prefill, tries=1)
    add(prefill, BROKEN)
    add(prefill, GOOD)
    run_worker(prefill)
    assert "Failed to send kv chunk" in sent_statuses(prefill)[BROKEN][1]
    assert "is not alive" in sent_statuses(prefill)[GOOD][1]
    time.sleep(0.3)
    add(prefill, LATER)
    run_worker(prefill)
    assert sent_statuses(prefill)[LATER] == (KVPoll.Success, None)
    assert prefill.failed_sessions._back_off.retry_in(PEER["mooncake"]) < -1000  # reset


def test_stock_never_retries_a_failed_session():
    prefill = requested_prefill(ENGINES)
    fail_transfers(prefill, tries=1)
    add(prefill, BROKEN)
    run_worker(prefill)
    time.sleep(1.1)
    add(prefill, GOOD)
    run_worker(prefill)
    assert prefill.request_status[GOOD] == KVPoll.Failed


def test_exception_before_any_chunk_fails_no_room():
    """The worker's thread continues."""
    prefill = requested_prefill()
    (queue,) = prefill.transfer_queues
    get = queue.get
    left = [OSError("queue")]
    queue.get = lambda: (_ for _ in ()).throw(left.pop()) if left else get()
    add(prefill, GOOD)
    run_worker(prefill)
    assert sent_statuses(prefill) == {GOOD: (KVPoll.Success, None)}


def test_pages_are_written_in_several_batches():
    prefill = requested_prefill()
    prefill.max_transfer_batch_indices = 2
    add(prefill, GOOD, pages=(9, 8, 7))
    run_worker(prefill)
    starts = fake_managers.BASE[fake_managers.PREFILL], fake_managers.BASE[DECODE]
    written = {
        tuple((at - start) // fake_managers.PAGE_BYTES for at, start in zip(pair, starts))
        for *pair, _ in fake_managers.posted_copies(prefill)
        if pair[0] - starts[0] < fake_managers.BUFFER and pair[0] >= starts[0]
    }
    assert {page for page, _ in written} >= {9, 7}
    assert written <= {(9, 0), (8, 1), (7, 2)}


def test_no_batch_is_written_before_all_pages_are_validated():
    prefill = requested_prefill()
    prefill.max_transfer_batch_indices = 2
    add(prefill, BROKEN, pages=(0, 1, 2, NO_PAGE))
    run_worker(prefill)
    assert sent_statuses(prefill)[BROKEN][0] == KVPoll.Failed
    assert not fake_managers.posted_copies(prefill)


def test_aux_messages_carry_their_buffer_numbers():
    """Decode has no row of hidden states, number 8; the next row keeps its number, 9."""
    widths = (64,) * 8 + (0, 64)
    prefill = requested_prefill()
    decode = fake_managers.make_manager(
        "mooncake", replace(fake_managers.mla_layout(), aux=widths), DECODE
    )
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode))
    sent = []
    prefill.send_aux_data_to_endpoint = lambda *named: sent.append(named[3])
    (req,) = prefill.transfer_infos[GOOD].values()
    assert prefill.send_aux_tcp(req, 0, fake_managers.registered_peer(prefill).dst_aux_ptrs) == 0
    assert sent == [*range(8), 9]


def test_room_cleared_during_a_send_is_left_unchanged():
    """Another request may use the room by then."""
    prefill = requested_prefill()

    def cleared(*_, **__):
        prefill.request_status.pop(BROKEN)
        raise OSError("no memory")

    prefill.send_kvcache = cleared
    add(prefill, BROKEN)
    run_worker(prefill)
    assert not prefill.notified and not prefill.failure_records
    assert BROKEN not in prefill.request_status
