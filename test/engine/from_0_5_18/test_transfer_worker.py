"""Mooncake's transfer worker: an error in a chunk fails its room, and no other."""

import time
from types import SimpleNamespace
from unittest.mock import Mock

import fake_managers
import pytest
from engine_release import IS_0_5_18, not_0_5_18
from fake_managers import add_chunk, decode_rank, posted_copies, prefill_rank, run_mooncake_worker
from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.disaggregation.pd import back_off
from sglang.srt.disaggregation.pd.room_failures import abort_message

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

BROKEN, GOOD, LATER = 7, 8, 9
NO_PAGE = fake_managers.PAGES + 900
SESSION = fake_managers.PEER["mooncake"]


def requested_prefill(**more):
    """A prefill rank from which a decode rank has requested all rooms."""
    prefill = prefill_rank("mooncake", **more)
    fake_managers.request_rooms(prefill, decode_rank("mooncake"), BROKEN, GOOD, LATER)
    return prefill


@pytest.fixture
def prefill(published):
    return requested_prefill()


def raise_once(target, name: str, error: Exception) -> None:
    """Makes the first call of a method raise `error`."""
    call, left = getattr(target, name), [error]

    def called(*args, **options):
        if left:
            raise left.pop()
        return call(*args, **options)

    setattr(target, name, called)


def sent_statuses(prefill) -> dict[int, tuple[int, str]]:
    found = fake_managers.sent_statuses(prefill)
    assert len(found) == len({room for room, *_ in found})
    return {room: (status, reason) for room, status, reason in found}


def abort(prefill, room: int) -> bool:
    """Aborts the room as decode; returns whether prefill acknowledges that no write is left."""
    prefill.notified.clear()
    prefill._handle_abort_notification(abort_message(room, fake_managers.ENDPOINT, 3))
    return [frames for _, frames in prefill.notified] == [[b"ABORT_ACK", b"%d" % room, b"0", b"3"]]


def test_valid_chunks_succeed(prefill):
    add_chunk(prefill, BROKEN)
    add_chunk(prefill, GOOD)
    run_mooncake_worker(prefill)
    assert sent_statuses(prefill) == dict.fromkeys((BROKEN, GOOD), (KVPoll.Success, None))


@pytest.mark.parametrize(
    "name, is_last", [("send_kvcache", True), ("send_kvcache", False), ("send_aux", True)]
)
def test_exception_fails_its_room(name, is_last, prefill):
    raise_once(prefill, name, OSError("no memory"))
    add_chunk(prefill, BROKEN, is_last=is_last)
    run_mooncake_worker(prefill)
    reason = "Prefill could not send KV: no memory"
    assert sent_statuses(prefill) == {BROKEN: (KVPoll.Failed, reason)}
    assert prefill.request_status[BROKEN] == KVPoll.Failed
    assert prefill.failure_records == {BROKEN: reason}
    assert BROKEN not in prefill._staging_outstanding


def test_worker_continues_after_an_exception(prefill):
    raise_once(prefill, "send_kvcache", OSError("no memory"))
    add_chunk(prefill, BROKEN, is_last=False)
    add_chunk(prefill, BROKEN)  # skipped, as its room has failed by then
    add_chunk(prefill, GOOD)
    run_mooncake_worker(prefill)
    assert {room: status for room, (status, _) in sent_statuses(prefill).items()} == {
        BROKEN: KVPoll.Failed,
        GOOD: KVPoll.Success,
    }
    assert not prefill._staging_outstanding


def test_worker_continues_if_decode_cannot_be_notified(prefill):
    """A worker that ended would leave the queue of its decode ranks busy for good."""
    raise_once(prefill, "send_kvcache", OSError("no memory"))
    name = "_send_multipart_locked" if IS_0_5_18 else "conclude_failure"
    raise_once(prefill, name, OSError("no sockets"))
    add_chunk(prefill, BROKEN)
    add_chunk(prefill, GOOD)
    run_mooncake_worker(prefill)
    assert sent_statuses(prefill)[GOOD] == (KVPoll.Success, None)


def test_reason_that_is_no_text_is_sent(prefill, monkeypatch):
    """As of a path with bytes that are not UTF-8."""
    monkeypatch.setattr(mooncake, "logger", Mock())  # the tests' report cannot hold such text
    raise_once(prefill, "send_kvcache", OSError("no \udcff"))
    add_chunk(prefill, BROKEN)
    run_mooncake_worker(prefill)
    assert sent_statuses(prefill)[BROKEN] == (KVPoll.Failed, "Prefill could not send KV: no ?")


def test_stock_worker_crashes_on_an_exception():
    prefill = requested_prefill(kinds=fake_managers.ENGINES)
    raise_once(prefill, "send_kvcache", OSError("no memory"))
    add_chunk(prefill, BROKEN)
    add_chunk(prefill, GOOD)
    with pytest.raises(RuntimeError, match="Transfer thread failed because of no memory"):
        run_mooncake_worker(prefill)
    assert not prefill.notified


def test_no_abort_ack_after_an_exception(prefill):
    """A write may still be running."""
    raise_once(prefill, "send_kvcache", OSError("no memory"))
    add_chunk(prefill, BROKEN)
    run_mooncake_worker(prefill)
    assert not abort(prefill, BROKEN)


def test_abort_ack_after_pages_out_of_range(prefill):
    """No write has begun."""
    add_chunk(prefill, BROKEN, (0, NO_PAGE))
    run_mooncake_worker(prefill)
    assert not posted_copies(prefill)
    status, reason = sent_statuses(prefill)[BROKEN]
    assert status == KVPoll.Failed and str(NO_PAGE) in reason
    assert abort(prefill, BROKEN)


@not_0_5_18("never ends its workers")
def test_worker_stops_with_its_server(prefill):
    run_mooncake_worker(prefill)
    assert not prefill.notified


def fail_next_transfer(prefill) -> None:
    write, left = prefill.engine.batch_transfer_sync, [-1]
    prefill.engine.batch_transfer_sync = lambda *lists: left.pop() if left else write(*lists)


def test_failed_session_is_retried_soon(prefill, monkeypatch):
    monkeypatch.setattr(back_off, "BACK_OFF_SECONDS", 0.3)
    fail_next_transfer(prefill)
    add_chunk(prefill, BROKEN)
    add_chunk(prefill, GOOD)
    run_mooncake_worker(prefill)
    assert "Failed to send kv chunk" in sent_statuses(prefill)[BROKEN][1]
    assert "is not alive" in sent_statuses(prefill)[GOOD][1]
    time.sleep(0.3)
    add_chunk(prefill, LATER)
    run_mooncake_worker(prefill)
    assert sent_statuses(prefill)[LATER] == (KVPoll.Success, None)
    assert prefill.failed_sessions._back_off.retry_in(SESSION) < -1000  # reset


def test_stock_never_retries_a_failed_session():
    prefill = requested_prefill(kinds=fake_managers.ENGINES)
    fail_next_transfer(prefill)
    add_chunk(prefill, BROKEN)
    run_mooncake_worker(prefill)
    time.sleep(1.1)
    add_chunk(prefill, GOOD)
    run_mooncake_worker(prefill)
    assert prefill.request_status[GOOD] == KVPoll.Failed


def test_exception_before_a_chunk_is_taken_fails_no_room(prefill):
    """The worker's thread continues."""
    add_chunk(prefill, LATER)
    run_mooncake_worker(prefill)
    (queue,) = set(prefill.transfer_queues)
    raise_once(queue, "get", OSError("queue"))
    add_chunk(prefill, GOOD)
    run_mooncake_worker(prefill)
    assert sent_statuses(prefill) == dict.fromkeys((LATER, GOOD), (KVPoll.Success, None))


def test_pages_are_written_in_several_batches(prefill):
    prefill.max_transfer_batch_indices = 2
    add_chunk(prefill, GOOD, (9, 8, 7))
    run_mooncake_worker(prefill)
    (own, theirs), page = fake_managers.BASE.values(), fake_managers.PAGE_BYTES
    written = {
        ((src - own) // page, (dst - theirs) // page)
        for src, dst, _ in posted_copies(prefill)
        if 0 <= src - own < fake_managers.BUFFER
    }
    assert {page for page, _ in written} >= {9, 7}
    assert written <= {(9, 0), (8, 1), (7, 2)}


def test_no_batch_is_written_before_all_pages_are_validated(prefill):
    prefill.max_transfer_batch_indices = 2
    add_chunk(prefill, BROKEN, (0, 1, 2, NO_PAGE))
    run_mooncake_worker(prefill)
    assert sent_statuses(prefill)[BROKEN][0] == KVPoll.Failed
    assert not posted_copies(prefill)


def test_aux_messages_carry_their_buffer_numbers(prefill):
    """Decode has no row of hidden states, number 8; the next row keeps its number, 9."""
    layout = replace(fake_managers.mla_layout(), aux=(64,) * 8 + (0, 64))
    fake_managers.register(prefill, decode_rank("mooncake", layout))
    sent = []
    prefill.send_aux_data_to_endpoint = lambda *named: sent.append(named[3])
    (req,) = prefill.transfer_infos[GOOD].values()
    assert prefill.send_aux_tcp(req, 0, fake_managers.registered_peer(prefill).dst_aux_ptrs) == 0
    assert sent == [*range(8), 9]


def test_room_cleared_during_a_send_is_left_unchanged(prefill):
    """Another request may use the room by then."""

    def cleared(*_, **__):
        prefill.request_status.pop(BROKEN)
        raise OSError("no memory")

    prefill.send_kvcache = cleared
    add_chunk(prefill, BROKEN)
    run_mooncake_worker(prefill)
    assert not prefill.notified and not prefill.failure_records
    assert BROKEN not in prefill.request_status


@not_0_5_18("probes a dead session every 30 s, and forever")
def test_engine_probes_a_dead_session_less_often_and_drops_it(prefill, monkeypatch):
    """Although workers may try it again; a decode rank that has exited never registers it anew."""
    start, failed = round(time.monotonic()), back_off.FailedSessions()
    clock, probes = SimpleNamespace(now=start), []
    for module in (back_off, mooncake):
        monkeypatch.setattr(module.time, "monotonic", lambda: clock.now)
    prefill.failed_sessions, prefill.session_failures = failed, {}
    prefill.failed_session_probe_interval, prefill.failed_session_probe_max_interval = 30.0, 300.0
    prefill.failed_session_idle_timeout = 600.0
    prefill.engine.send_probe = lambda session: probes.append(clock.now - start) or -1
    failed.add(SESSION)
    while SESSION in list(failed) and clock.now < start + 1000:
        prefill._run_one_probe_pass()
        clock.now += 1
    assert probes == [0, 30 + 30, 180, 420]
    assert 600 <= clock.now - start <= 602 and not prefill.failed_session_probes
