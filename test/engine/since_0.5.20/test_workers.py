"""Mooncake's transfer worker: what goes wrong with a chunk fails its room, and no other."""

import time
from concurrent.futures import ThreadPoolExecutor

import managers
import numpy as np
import pytest
from managers import DECODE, ENGINES, PATCHED, PEER
from msgspec.structs import replace
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import ABORT_TAG
from sglang.srt.disaggregation.pd import back_off

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

BROKEN, GOOD, LATER = 7, 8, 9
NO_PAGE = managers.PAGES + 900


def asked(kinds=PATCHED, rooms=(BROKEN, GOOD)):
    """A prefill rank that is asked for these rooms."""
    prefill = managers.rank("mooncake", managers.latents(), kinds=kinds)
    decode = managers.rank("mooncake", managers.latents(), DECODE)
    for room in rooms:
        prefill.request_status[room] = KVPoll.Bootstrapping
    requests = [managers.request(decode, room, range(4)) for room in rooms]
    managers.read(prefill, managers.registration(decode), *requests)
    return prefill


def add(prefill, room: int, pages=(0, 1, 2, 3), is_last=True) -> None:
    numbers = np.array(pages, dtype=np.int32)
    prefill.add_transfer_request(room, numbers, slice(0, len(pages)), is_last, aux_index=0)


def work(prefill) -> None:
    """Until the queue says that the server ends; raises what would end the thread."""
    (queue,) = prefill.transfer_queues
    queue.put(None)
    with ThreadPoolExecutor(1) as executor:
        prefill.transfer_worker(queue, executor)
    assert not managers.queued(prefill)


def raise_for(prefill, error: Exception, name: str = "send_kvcache") -> None:
    """The first call raises."""
    send = getattr(prefill, name)
    left = [error]

    def sent(*args, **options):
        if left:
            raise left.pop()
        return send(*args, **options)

    setattr(prefill, name, sent)


def told(prefill) -> dict[int, tuple[int, str]]:
    found = managers.statuses(prefill)
    assert len(found) == len({room for room, *_ in found})
    return {room: (status, reason) for room, status, reason in found}


def abort(prefill, room: int) -> bool:
    """Decode gives up; whether it hears that nothing is written any more."""
    prefill.told.clear()
    prefill._handle_abort_notification([ABORT_TAG, b"%d" % room, b"127.0.0.1", b"5555", b"3"])
    return [frames for _, frames in prefill.told] == [[b"ABORT_ACK", b"%d" % room, b"0", b"3"]]


def test_all_is_well():
    prefill = asked()
    add(prefill, BROKEN)
    add(prefill, GOOD)
    work(prefill)
    assert told(prefill) == dict.fromkeys((BROKEN, GOOD), (KVPoll.Success, None))


@pytest.mark.parametrize(
    "name, is_last", [("send_kvcache", True), ("send_kvcache", False), ("send_aux", True)]
)
def test_an_exception_fails_its_room(name, is_last):
    prefill = asked()
    raise_for(prefill, OSError("no memory"), name)
    add(prefill, BROKEN, is_last=is_last)
    work(prefill)
    reason = "Prefill could not send KV: no memory"
    assert told(prefill) == {BROKEN: (KVPoll.Failed, reason)}
    assert prefill.request_status[BROKEN] == KVPoll.Failed
    assert prefill.failure_records == {BROKEN: reason}
    assert BROKEN not in prefill._staging_outstanding


def test_the_thread_takes_the_next_chunk():
    prefill = asked()
    raise_for(prefill, OSError("no memory"))
    add(prefill, BROKEN, is_last=False)
    add(prefill, BROKEN)  # of a room that has failed meanwhile: left out
    add(prefill, GOOD)
    work(prefill)
    assert {room: status for room, (status, _) in told(prefill).items()} == {
        BROKEN: KVPoll.Failed,
        GOOD: KVPoll.Success,
    }
    assert not prefill._staging_outstanding


def test_the_engines_thread_ends():
    prefill = asked(ENGINES)
    raise_for(prefill, OSError("no memory"))
    add(prefill, BROKEN)
    add(prefill, GOOD)
    with pytest.raises(RuntimeError, match="Transfer thread failed because of no memory"):
        work(prefill)
    assert not prefill.told


def test_no_word_that_the_room_is_drained_after_an_exception():
    """A write may have begun, and not be over."""
    prefill = asked()
    raise_for(prefill, OSError("no memory"))
    add(prefill, BROKEN)
    work(prefill)
    assert not abort(prefill, BROKEN)


def test_but_after_pages_that_a_side_does_not_have():
    """Nothing was begun."""
    prefill = asked()
    add(prefill, BROKEN, pages=(0, NO_PAGE))
    work(prefill)
    assert not managers.writes(prefill)
    status, reason = told(prefill)[BROKEN]
    assert status == KVPoll.Failed and str(NO_PAGE) in reason
    assert abort(prefill, BROKEN)


def test_it_ends_when_its_server_does():
    prefill = asked()
    work(prefill)
    assert not prefill.told


def failing(prefill, tries: int) -> None:
    """So many calls to the transfer engine fail."""
    write, left = prefill.engine.batch_transfer_sync, [-1] * tries

    def transfer(*lists):
        return left.pop() if left else write(*lists)

    prefill.engine.batch_transfer_sync = transfer


def test_a_session_to_which_one_transfer_failed_is_soon_tried_again(monkeypatch):
    monkeypatch.setattr(back_off, "BACK_OFF_SECONDS", 0.3)
    prefill = asked(rooms=(BROKEN, GOOD, LATER))
    failing(prefill, tries=1)
    add(prefill, BROKEN)
    add(prefill, GOOD)
    work(prefill)
    assert "Failed to send kv chunk" in told(prefill)[BROKEN][1]
    assert "is not alive" in told(prefill)[GOOD][1]
    time.sleep(0.3)
    add(prefill, LATER)
    work(prefill)
    assert told(prefill)[LATER] == (KVPoll.Success, None)
    assert prefill.failed_sessions._back_off.seconds_left(PEER["mooncake"]) < -1000  # forgiven


def test_the_engine_never_tries_it_again():
    prefill = asked(ENGINES)
    failing(prefill, tries=1)
    add(prefill, BROKEN)
    work(prefill)
    time.sleep(1.1)
    add(prefill, GOOD)
    work(prefill)
    assert prefill.request_status[GOOD] == KVPoll.Failed


def test_an_exception_before_any_chunk_fails_no_room():
    """And the thread goes on."""
    prefill = asked()
    (queue,) = prefill.transfer_queues
    get = queue.get
    left = [OSError("queue")]
    queue.get = lambda: (_ for _ in ()).throw(left.pop()) if left else get()
    add(prefill, GOOD)
    work(prefill)
    assert told(prefill) == {GOOD: (KVPoll.Success, None)}


def test_pages_in_several_batches():
    prefill = asked()
    prefill.max_transfer_batch_indices = 2
    add(prefill, GOOD, pages=(9, 8, 7))
    work(prefill)
    starts = managers.BASE[managers.PREFILL], managers.BASE[DECODE]
    written = {
        tuple((at - start) // managers.PAGE_BYTES for at, start in zip(pair, starts))
        for *pair, _ in managers.writes(prefill)
        if pair[0] - starts[0] < managers.BUFFER and pair[0] >= starts[0]
    }
    assert {page for page, _ in written} >= {9, 7}
    assert written <= {(9, 0), (8, 1), (7, 2)}


def test_no_batch_is_written_before_all_pages_are_known_to_be_there():
    prefill = asked()
    prefill.max_transfer_batch_indices = 2
    add(prefill, BROKEN, pages=(0, 1, 2, NO_PAGE))
    work(prefill)
    assert told(prefill)[BROKEN][0] == KVPoll.Failed
    assert not managers.writes(prefill)


def test_metadata_in_messages_say_which_rows_they_are():
    """Decode has no use for the row of hidden states, and the one behind it stays the ninth."""
    widths = (64,) * 8 + (0, 64)
    prefill = asked()
    decode = managers.rank("mooncake", replace(managers.latents(), aux=widths), DECODE)
    managers.read(prefill, managers.registration(decode))
    sent = []
    prefill.send_aux_data_to_endpoint = lambda *named: sent.append(named[3])
    (req,) = prefill.transfer_infos[GOOD].values()
    assert prefill.send_aux_tcp(req, 0, managers.known(prefill).dst_aux_ptrs) == 0
    assert sent == [*range(8), 9]


def test_a_room_that_is_cleared_meanwhile_is_left_alone():
    """Its number may be another request's by then."""
    prefill = asked()

    def cleared(*_, **__):
        prefill.request_status.pop(BROKEN)
        raise OSError("no memory")

    prefill.send_kvcache = cleared
    add(prefill, BROKEN)
    work(prefill)
    assert not prefill.told and not prefill.failure_records
    assert BROKEN not in prefill.request_status
