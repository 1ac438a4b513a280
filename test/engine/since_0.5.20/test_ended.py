"""Decode hears of requests that have ended on prefill, also if it asks for them only then."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor, wait
from weakref import WeakValueDictionary

import managers
import pytest
from managers import BACKENDS, DECODE, PATCHED, SENDERS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common
from sglang.srt.disaggregation.pd import ended, peer_sockets, silence

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM, ABORTED = 7, "Aborted by AbortReq."


class StockSender(common.EngineCommonKVSender):
    def send(self, *_):
        raise NotImplementedError


def prefill_rank(backend, kinds=PATCHED, **more):
    return managers.rank(backend, managers.latents(), kinds=kinds, **more)


def decode_rank(backend, number: int = 0):
    decode = managers.rank(backend, managers.latents(), DECODE)
    decode.rank_port += number
    return decode


def ask(prefill, decode, room: int = ROOM) -> None:
    managers.read(prefill, managers.request(decode, room, range(4)))


def abort_by_decode(prefill, room: int) -> None:
    managers.read(prefill, [common.ABORT_TAG, b"%d" % room])


def new(prefill, room: int = ROOM):
    return SENDERS[managers.backend_of(prefill)](prefill, "127.0.0.1:8998", room)


def end(sender) -> str:
    """As the scheduler does with a request that has failed; what its client is told."""
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(common.KVTransferError) as raised:
        sender.failure_exception()
    return raised.value.failure_reason


def told(prefill) -> list[tuple[str, int, int, str]]:
    """To where, which room, status and reason; it is forgotten then."""
    ports = [endpoint.rsplit(":", 1)[1] for endpoint, _ in prefill.told]
    found = [(port, *said) for port, said in zip(ports, managers.statuses(prefill))]
    prefill.told.clear()
    return found


FAILED = ("5555", ROOM, KVPoll.Failed, ABORTED)
GIVEN_UP = [common.ABORT_TAG, b"%d" % ROOM, b"127.0.0.1", b"5555"]  # by that decode rank


@backends
def test_decode_that_has_asked_hears_of_an_abort(backend):
    prefill = prefill_rank(backend)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    sender.abort()
    assert told(prefill) == [FAILED]
    assert end(sender) == ABORTED
    assert told(prefill) == []
    assert not prefill.request_status and not prefill.failure_records


@backends
def test_decode_that_asks_while_a_request_ends_hears_of_it(backend):
    """Between stages or TP ranks agreeing, it may be a whole round until the scheduler looks."""
    prefill = prefill_rank(backend)
    sender = new(prefill)
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)
    ask(prefill, decode_rank(backend))
    assert told(prefill) == []
    assert end(sender) == ABORTED
    assert told(prefill) == [FAILED]
    ask(prefill, decode_rank(backend, 1))
    assert [port for port, *_ in told(prefill)] == ["5556"]


@backends
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_decode_that_asks_just_as_the_end_is_noted_hears_of_it(backend, first, monkeypatch):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender, note = new(prefill), prefill.note_ended

    def noted(*ended):
        if first:
            ask(prefill, decode)
        note(*ended)
        if not first:
            ask(prefill, decode)

    monkeypatch.setattr(prefill, "note_ended", noted)
    sender.abort()
    assert told(prefill) == [FAILED]


class KeptSlowly(dict):
    """Between what the engine keeps of an ask and the next, `meanwhile` is called."""

    def __setitem__(self, room, infos):
        super().__setitem__(room, infos)
        self.meanwhile()


@backends
@pytest.mark.parametrize("seconds", [0.02, 5 * ended.MAX_ASK_SECONDS])
def test_decode_whose_ask_is_being_kept_as_a_request_ends_hears_of_it(backend, seconds):
    """On stock the thread that reads messages may end there; it may be slow on a busy machine."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    prefill.transfer_infos = KeptSlowly()
    with ThreadPoolExecutor(1) as scheduler:
        scheduler.submit(int).result()  # while messages are read, no thread is started
        prefill.transfer_infos.meanwhile = lambda: wait([scheduler.submit(sender.abort)], seconds)
        ask(prefill, decode)
    assert told(prefill) == [FAILED]
    assert not prefill.request_status and not prefill.transfer_infos


@backends
def test_staging_buffers_are_asked_for_when_all_decode_ranks_have_asked(backend, monkeypatch):
    """The scheduler would go through those of a room while another one is added, and may end."""
    prefetched = []
    engine = managers.ENGINES[backend]
    monkeypatch.setattr(engine, "_prefetch_staging_reqs", lambda _, room: prefetched.append(room))
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    for ranks, expected in ((2, []), (1, [ROOM])):
        asked = managers.request(decode, ROOM, range(4), required_dst_info_num=ranks)
        managers.read(prefill, asked)
        prefill._prefetch_staging_reqs(ROOM)
        assert prefetched == expected
    assert sender.poll() == KVPoll.WaitingForInput


@backends
def test_nobody_waits_for_a_reader_that_does_not_come_back(backend):
    """Not the scheduler for each of many rooms, one after the other."""
    prefill = prefill_rank(backend)
    senders = [new(prefill, room) for room in range(100)]
    prefill.ask_lock.acquire()
    start = time.monotonic()
    for sender in senders:
        sender.abort()
        assert end(sender) == ABORTED
    assert time.monotonic() - start < 10 * ended.MAX_ASK_SECONDS
    new(prefill)
    prefill.ask_lock.release()
    new(prefill).abort()
    assert prefill.ask_patience == ended.MAX_ASK_SECONDS


@backends
@pytest.mark.parametrize("is_over", [False, True])
def test_of_who_gives_a_room_up_so_many_are_remembered(backend, is_over, monkeypatch):
    monkeypatch.setattr(ended, "MAX_TOLD", 3)
    prefill = prefill_rank(backend)
    sender = new(prefill)
    if is_over:
        sender.abort()
    for port in range(5555, 5565):
        managers.read(prefill, [*GIVEN_UP[:3], b"%d" % port])
    assert len(sender.told) == 3


@backends
def test_of_who_asks_for_an_ended_room_so_many_are_remembered(backend, monkeypatch):
    monkeypatch.setattr(ended, "MAX_TOLD", 3)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    sender.abort()
    for port in range(5555, 5565):
        decode.rank_port = port
        ask(prefill, decode)
    assert [to for to, *_ in told(prefill)] == [str(port) for port in range(5555, 5565)]
    assert len(sender.told) == 3


@backends
def test_decode_that_gives_up_is_not_told_so_if_its_message_is_still_being_read(backend):
    """Else the next request of that number may hear of it."""
    prefill = prefill_rank(backend)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    update = prefill.update_status

    def ended_at_once(room, status):
        update(room, status)
        end(sender)
        sender.clear()

    prefill.update_status = ended_at_once
    managers.read(prefill, GIVEN_UP)
    prefill.update_status = update
    assert told(prefill) == []
    new(prefill)
    ask(prefill, decode_rank(backend))
    assert told(prefill) == []


@backends
def test_decode_that_gives_up_just_as_the_end_is_noted_is_not_told_so(backend, monkeypatch):
    prefill = prefill_rank(backend)
    sender, note = new(prefill), prefill.note_ended
    ask(prefill, decode_rank(backend))

    def noted(*ended):
        note(*ended)
        managers.read(prefill, GIVEN_UP)

    monkeypatch.setattr(prefill, "note_ended", noted)
    prefill.update_status(ROOM, KVPoll.Failed)
    end(sender)
    assert told(prefill) == []


@backends
def test_what_decode_gives_up_before_all_its_ranks_have_asked(backend):
    """The engine forgets it, and the request that comes then waits for the other rank."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    asked = managers.request(decode, ROOM, range(4), required_dst_info_num=2)
    managers.read(prefill, asked, GIVEN_UP)
    sender = new(prefill)
    end(sender)
    assert told(prefill) == []
    assert not prefill.request_status and not prefill.transfer_infos


@backends
def test_decode_may_give_up_a_request_just_as_it_comes(backend):
    prefill = prefill_rank(backend)

    class Requested(WeakValueDictionary):
        def __setitem__(self, room, sender):
            super().__setitem__(room, sender)
            managers.read(prefill, [common.ABORT_TAG, b"%d" % room, b"127.0.0.1", b"5555"])

    prefill.requested = Requested()
    assert new(prefill).told == {("127.0.0.1", 5555)}


@backends
def test_decode_is_told_once_of_a_request_that_ends(backend):
    prefill = prefill_rank(backend)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)
    assert told(prefill) == [FAILED]
    assert end(sender) == ABORTED
    assert told(prefill) == []


@backends
@pytest.mark.parametrize("status", [KVPoll.Failed, KVPoll.Success])
def test_decode_is_told_once_if_the_scheduler_is_quicker_than_the_message(backend, status):
    """The engine marks a room before it tells decode, which may ask anew once it has heard."""
    prefill = prefill_rank(backend)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    prefill.record_failure(ROOM, ABORTED)
    update = prefill.update_status

    def ended_at_once(room, status):
        update(room, status)
        end(sender)

    prefill.update_status = ended_at_once
    prefill.conclude_transfer(bootstrap_room=ROOM, status=status)
    assert told(prefill) == [FAILED]


@backends
def test_it_hears_nothing_while_a_write_may_run_on(backend):
    """Without deferred release it would free its pages at once."""
    prefill = prefill_rank(backend, enable_deferred_decode_kv_release=False)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    sender.abort()
    assert told(prefill) == []


@backends
@pytest.mark.parametrize("is_aborted", [True, False])
def test_nor_of_a_room_with_a_write_that_did_not_settle(backend, is_aborted):
    prefill = prefill_rank(backend)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    prefill.update_status(ROOM, KVPoll.Failed)
    prefill.poison_deferred_ack_room(ROOM)
    if is_aborted:
        sender.abort()
    else:
        end(sender)
    assert told(prefill) == []


@backends
def test_what_the_engine_says_of_an_abort(backend):
    prefill = prefill_rank(backend, managers.ENGINES)
    sender = StockSender(prefill, "127.0.0.1:8998", ROOM)
    ask(prefill, decode_rank(backend))
    sender.abort()
    assert told(prefill) == []


@backends
def test_decode_that_has_asked_hears_of_a_timeout(backend):
    """Only one of two decode ranks has."""
    prefill = prefill_rank(backend, bootstrap_timeout=0)
    sender = new(prefill)
    request = managers.request(decode_rank(backend), ROOM, range(4), required_dst_info_num=2)
    managers.read(prefill, request)
    assert sender.poll() == KVPoll.Failed
    ((port, room, status, reason),) = told(prefill)
    assert (port, room, status) == ("5555", ROOM, KVPoll.Failed)
    assert "timed out" in reason


@backends
def test_decode_that_asks_afterwards_is_told_once(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    sender.abort()
    end(sender)
    assert told(prefill) == []
    ask(prefill, decode)
    assert told(prefill) == [FAILED]
    assert ROOM not in prefill.transfer_infos
    # Asked again, it is a new request, which prefill's part has not come of yet.
    ask(prefill, decode)
    assert told(prefill) == []
    assert list(prefill.transfer_infos[ROOM]) == [managers.PEER[backend]]
    assert new(prefill).poll() in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)


@backends
def test_each_decode_rank_is_told(backend):
    prefill = prefill_rank(backend)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    sender.abort()
    end(sender)
    assert [port for port, *_ in told(prefill)] == ["5555"]
    ask(prefill, decode_rank(backend, 1))
    assert [port for port, *_ in told(prefill)] == ["5556"]


@backends
def test_what_the_engine_says_to_decode_that_asks_afterwards(backend):
    """Nothing, and the room waits for a prefill request that will not come."""
    prefill = prefill_rank(backend, managers.ENGINES)
    sender = StockSender(prefill, "127.0.0.1:8998", ROOM)
    sender.abort()
    end(sender)
    ask(prefill, decode_rank(backend))
    assert told(prefill) == []
    assert ROOM in prefill.transfer_infos


@backends
def test_decode_that_was_told_while_it_waited_has_a_new_request(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    ask(prefill, decode)
    sender.abort()
    end(sender)
    told(prefill)
    ask(prefill, decode)
    assert told(prefill) == []
    assert ROOM in prefill.transfer_infos


@backends
def test_a_new_request_of_the_room_clears_what_was_remembered(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    sender.abort()
    end(sender)
    sender = new(prefill)
    ask(prefill, decode)
    assert told(prefill) == []
    assert sender.poll() == KVPoll.WaitingForInput


@backends
def test_a_request_that_succeeded_is_not_remembered(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    ask(prefill, decode)
    prefill.update_status(ROOM, KVPoll.Success)
    assert sender.poll() == KVPoll.Success
    sender.clear()
    ask(prefill, decode)
    assert told(prefill) == []
    assert ROOM in prefill.transfer_infos


@backends
@pytest.mark.parametrize("how", ["success", "abort"])
def test_a_room_that_is_asked_for_again_outlives_the_sender_before(backend, how):
    """Pipeline stages keep a finished request until another batch takes its place."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    ask(prefill, decode)
    if how == "success":
        prefill.request_status[ROOM] = KVPoll.Success
        assert sender.poll() == KVPoll.Success
        sender.clear()
    else:
        sender.abort()
    ask(prefill, decode)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    del sender
    gc.collect()
    assert len(prefill.transfer_infos[ROOM]) == 1
    assert new(prefill).poll() == KVPoll.WaitingForInput


@backends
def test_no_count_of_its_chunks_is_kept(backend):
    """The engine keeps it where a chunk that is not the last one ends after the room has failed."""
    prefill = prefill_rank(backend)
    sender = new(prefill)
    ask(prefill, decode_rank(backend))
    prefill._staging_outstanding[ROOM] = 0
    sender.abort()
    end(sender)
    assert ROOM not in prefill._staging_outstanding


@backends
def test_so_many_are_remembered(backend, monkeypatch):
    monkeypatch.setattr(ended, "MAX_ENDED", 3)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    for room in range(5):
        sender = new(prefill, room)
        sender.abort()
        end(sender)
    for room in range(5):
        ask(prefill, decode, room)
    assert [room for _, room, *_ in told(prefill)] == [2, 3, 4]


def kept(prefill) -> list[set[int]]:
    tables = ("request_status", "transfer_infos", "req_to_decode_prefix_len")
    return [set(getattr(prefill, name)) for name in tables]


@backends
def test_rooms_that_decode_gave_up_unrequested_are_kept_for_a_while(backend, monkeypatch):
    """A request may come to prefill later than its abort, which it must find."""
    monkeypatch.setattr(ended, "MAX_ENDED", 3)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    requested = new(prefill, 0)
    for room in range(6):
        ask(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert kept(prefill) == [{0, 3, 4, 5}] * 3
    assert prefill.failure_records.keys() <= {0, 3, 4, 5}
    assert requested.poll() == KVPoll.Failed
    late = new(prefill, 4)
    assert late.poll() == KVPoll.Failed


@backends
def test_not_that_of_a_request_that_came(backend, monkeypatch):
    monkeypatch.setattr(ended, "MAX_ENDED", 2)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    for room in range(2):
        ask(prefill, decode, room)
        abort_by_decode(prefill, room)
    came = new(prefill, 0)
    for room in range(2, 6):
        ask(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert kept(prefill) == [{0, 4, 5}] * 3
    assert came.poll() == KVPoll.Failed


@backends
def test_that_of_a_request_that_is_gone_may_be_dropped(backend, monkeypatch):
    """A sender that is dropped without being cleared holds nothing."""
    monkeypatch.setattr(ended, "MAX_ENDED", 2)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    new(prefill, 0)
    gc.collect()
    for room in range(4):
        ask(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert kept(prefill) == [{2, 3}] * 3


@backends
def test_a_sender_may_be_collected_within_another_threads_lock(backend):
    """Which is where memory is asked for, whatever is held then."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    senders = [new(prefill)]
    prefill.update_status(ROOM, KVPoll.Failed)
    with ThreadPoolExecutor(1) as other, prefill.ended_lock:
        other.submit(senders.clear).result(timeout=5)
    ask(prefill, decode)
    assert [status for _, _, status, _ in told(prefill)] == [KVPoll.Failed]
    assert not prefill.left and ROOM not in prefill.request_status


@backends
def test_decode_that_asks_before_a_failed_sender_is_collected_hears_of_it(backend):
    """The scheduler never looks at it."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    prefill.conclude_failure(bootstrap_room=ROOM, failure_reason=ABORTED)
    ask(prefill, decode)
    assert told(prefill) == []
    del sender
    gc.collect()
    new(prefill, ROOM + 1)
    assert told(prefill) == [FAILED]


@backends
@pytest.mark.parametrize("ranks", [1, 2], ids=["whole", "in part"])
def test_a_decode_rank_that_is_gone_is_not_kept_for_them(backend, ranks, monkeypatch):
    """It cannot give them up."""
    monkeypatch.setattr(silence, "MAX_RESTING", 0)
    monkeypatch.setattr(ended, "MAX_ENDED", 2)
    monkeypatch.setattr(peer_sockets.PeerSocket, "silent_for", lambda self: silence.REST_SECONDS)
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    asks = [
        managers.request(decode, room, range(4), required_dst_info_num=ranks) for room in range(3)
    ]
    managers.read(prefill, managers.registration(decode), *asks)
    prefill.met[managers.PEER[backend]] = managers.known(prefill)
    requested = new(prefill, 0)
    prefill.look_at_peers()
    assert requested.poll() == KVPoll.Failed
    assert prefill.decode_kv_args_table  # a request has its room
    requested.clear()
    prefill.look_at_peers()
    assert not prefill.decode_kv_args_table and list(prefill.unrequested) == [1, 2]
    ask(prefill, decode, 3)
    abort_by_decode(prefill, 3)
    assert set(prefill.transfer_infos) == {2, 3}


@backends
def test_the_engine_keeps_them_all(backend):
    prefill, decode = prefill_rank(backend, managers.ENGINES), decode_rank(backend)
    for room in range(6):
        ask(prefill, decode, room)
        abort_by_decode(prefill, room)
    assert set(prefill.transfer_infos) == set(range(6))


@backends
def test_aborts_of_rooms_that_nobody_asked_for_are_not_kept(backend):
    prefill = prefill_rank(backend)
    for room in (b"8", b"-1", b"x", b"\xff", b"99999999999999999999"):
        managers.read(prefill, [common.ABORT_TAG, room])
    assert not prefill.unrequested and not prefill.request_status


@backends
def test_a_decode_rank_that_gave_up_its_room_is_told_nothing(backend):
    """Not even if it had not asked yet: what it asks for next is another request."""
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    sender = new(prefill)
    managers.read(prefill, GIVEN_UP)
    end(sender)
    ask(prefill, decode)
    assert told(prefill) == []
    assert ROOM in prefill.transfer_infos
    assert new(prefill).poll() == KVPoll.WaitingForInput


@backends
@pytest.mark.parametrize("frames", [[b"9" * 5000], [b"7", b"\xff", b"x"], [b"7", b"127.0.0.1"]])
def test_an_abort_with_numbers_that_are_none_ends_no_thread(backend, frames):
    prefill = prefill_rank(backend)
    sender = new(prefill)
    managers.read(prefill, [common.ABORT_TAG, *frames])
    assert not prefill.unrequested
    del sender


REFUSED = ("5555", ROOM, KVPoll.Failed, "too long")


@backends
@pytest.mark.parametrize("asks_first", [True, False])
def test_a_request_that_is_refused_before_it_has_a_sender(backend, asks_first):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    managers.read(prefill, managers.registration(decode))
    if asks_first:
        ask(prefill, decode)
    prefill.refuse(ROOM, "too long")
    if not asks_first:
        ask(prefill, decode)
    assert told(prefill) == [REFUSED]
    assert not prefill.request_status and not prefill.transfer_infos
    assert not prefill.unrequested and not prefill.requested
    ask(prefill, decode)  # it knows: this is another request of that number
    assert told(prefill) == []
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput


@backends
def test_a_refusal_does_not_touch_another_request_of_that_number(backend):
    prefill, decode = prefill_rank(backend), decode_rank(backend)
    managers.read(prefill, managers.registration(decode))
    sender = new(prefill)
    ask(prefill, decode)
    prefill.refuse(ROOM, "too long")
    assert told(prefill) == []
    assert sender.poll() == KVPoll.WaitingForInput


@backends
def test_rooms_that_were_written_to_last_of_all_are_remembered(backend, monkeypatch):
    """The engine remembers each until its number comes again, which may be never."""
    monkeypatch.setattr(ended, "MAX_POISONED", 3)
    prefill = prefill_rank(backend)
    for room in (1, 2, 3, 2, 4, 5):
        prefill._staging_outstanding[room] += 1
        prefill.poison_deferred_ack_room(room)
    assert prefill._deferred_ack_poisoned_rooms == {2, 4, 5} == set(prefill._staging_outstanding)


@backends
def test_no_reason_is_kept_of_one_whose_request_is_gone(backend):
    """NIXL's worker notes one for each write of which it does not know the end."""
    prefill = prefill_rank(backend)
    sender = new(prefill)
    for _ in range(2):
        prefill.record_failure(ROOM, "left a handle running")
        prefill.poison_deferred_ack_room(ROOM)
        assert len(prefill.failure_records) == (not sender.is_cleared)
        sender.clear()
