"""Decode: a request succeeds only once the heads that arrived as whole rows are interleaved.

Two prefill ranks of TP 2 send to one decode rank; both backends.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import packed_ranks
import pytest
import torch
import torch.distributed as dist
from packed_ranks import DST, HEADS, LAYERS, PAGE, SRC, UNITS, Rank, slots_of
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.kv_layout import Notification, encode_units
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.pd import interleaving
from sglang.srt.disaggregation.pd import receiver as receiver_module
from sglang.srt.disaggregation.pd.rank_consensus import reduce_polls
from sglang.srt.disaggregation.pd.sender import ABORTED

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

ROOM, PATIENCE = 7, 10.0
BUFFERS = 2 * LAYERS


class Gate:
    """Counts the units of buffers that are interleaved; holds the thread before each if closed."""

    def __init__(self):
        self.count, self.entered, self.open = 0, threading.Event(), threading.Event()
        self._interleave = interleaving.interleave
        self.open.set()

    def interleave(self, *unit) -> None:
        self.entered.set()
        assert self.open.wait(PATIENCE)
        self._interleave(*unit)
        self.count += 1


@pytest.fixture
def gate(monkeypatch):
    made = Gate()
    monkeypatch.setattr(interleaving, "interleave", made.interleave)
    yield made
    made.open.set()


@pytest.fixture
def model():
    return packed_ranks.random_model()


@pytest.fixture
def rank(decode, server) -> Rank:
    """The decode rank's pools."""
    server.sizes |= {"prefill_attn_tp_size": HEADS, "prefill_page_size": PAGE}
    return give_pools(decode)


def give_pools(decode) -> Rank:
    made = Rank(0, 1)
    vars(decode.kv_args).update(vars(made.args))
    return made


@pytest.fixture
def receiver(rank, locate):
    """A request that decode has sent to two prefill ranks."""
    made = locate(ROOM)
    made.init(np.array(DST, np.int32), 0)
    assert made.required_prefill_response_num == 2
    return made


def write_parts(rank: Rank, model, units=UNITS) -> None:
    """Writes what two prefill ranks of one head each write."""
    for first, end in units:
        src, dst = slots_of(SRC[first:end]), slots_of(DST[first:end])
        for rows, whole in zip(rank.rows, model):
            parts = [half.reshape(-1) for half in whole[src].chunk(HEADS, dim=1)]
            rows[dst] = torch.cat(parts).view(len(dst), -1)


def report_failure(decode, sender: int) -> None:
    """Notifies decode that a prefill rank has failed the room."""
    if isinstance(decode, MooncakeKVManager):
        decode._handle_status([b"%d" % ROOM, b"%d" % KVPoll.Failed, b"%d" % sender, b"no page"])
        return
    decode.record_failure(ROOM, "Prefill failed: no page")
    notice = Notification(ROOM, "failed", reason="no page")
    decode.transfer_statuses[ROOM].add(f"prefill {sender}", notice)


def report(decode, sender: int, units=()) -> None:
    """Notifies decode that a prefill rank has sent all, and of the chunks to interleave."""
    if isinstance(decode, MooncakeKVManager):
        named = [b"no reason", b"", encode_units(units)] if units else []
        decode._handle_status([b"%d" % ROOM, b"%d" % KVPoll.Success, b"%d" % sender, *named])
        return
    chunks = units or [None]
    notices = [
        Notification(ROOM, "kv", chunk=n, is_last=n == len(chunks) - 1, unit=unit)
        for n, unit in enumerate(chunks)
    ]
    for notice in (*notices, Notification(ROOM, "aux")):
        decode.transfer_statuses[ROOM].add(f"prefill {sender}", notice)


def report_all(decode) -> None:
    for sender in range(2):
        report(decode, sender, UNITS)


def fail_with_reason(receiver) -> str:
    """Ends a failed request as the scheduler does; returns the reason."""
    with pytest.raises(Exception) as raised:
        receiver.failure_exception()
    return str(raised.value)


def assert_nothing_kept(decode) -> None:
    tables = ("request_status", "transfer_statuses", "arrived_units", "requested_rooms")
    assert not any(getattr(decode, name) for name in tables)


def test_request_waits_until_its_heads_are_interleaved(decode, rank, receiver, model, gate):
    gate.open.clear()
    write_parts(rank, model)
    report(decode, 0, UNITS)
    assert receiver.poll() == KVPoll.WaitingForInput and "interleaver" not in vars(decode)
    report(decode, 1, UNITS)
    assert receiver.poll() == KVPoll.WaitingForInput
    assert gate.entered.wait(PATIENCE)
    assert receiver.poll() == KVPoll.WaitingForInput and receiver.has_pending_transfers()
    gate.open.set()
    assert wait_until(lambda: receiver.poll() == KVPoll.Success, PATIENCE)
    assert rank.has_received(model)
    assert receiver.poll() == KVPoll.Success
    receiver.clear()
    assert gate.count == BUFFERS * len(UNITS)  # once each
    assert_nothing_kept(decode)


def test_unit_of_which_a_part_comes_late_is_interleaved_after_it(decode, rank, receiver, model):
    """A sender's last chunk, its metadata and all of the other sender come first."""
    if isinstance(decode, MooncakeKVManager):
        pytest.skip("Mooncake's message follows all chunks of its sender")
    status = decode.transfer_statuses[ROOM]
    last = Notification(ROOM, "kv", chunk=1, is_last=True, unit=UNITS[1])
    write_parts(rank, model, UNITS[1:])
    for notice in (last, Notification(ROOM, "aux")):
        status.add("prefill 0", notice)
        assert receiver.poll() == KVPoll.WaitingForInput
    report(decode, 1, UNITS)
    assert receiver.poll() == KVPoll.WaitingForInput
    assert receiver.interleaving is None and "interleaver" not in vars(decode)
    write_parts(rank, model, UNITS[:1])
    status.add("prefill 0", Notification(ROOM, "kv", chunk=0, unit=UNITS[0]))
    assert wait_until(lambda: receiver.poll() == KVPoll.Success, PATIENCE)
    assert rank.has_received(model)


def test_later_request_of_the_room_interleaves_its_own_chunks(
    decode, rank, receiver, model, gate, locate
):
    write_parts(rank, model)
    report_all(decode)
    assert wait_until(lambda: receiver.poll() == KVPoll.Success, PATIENCE)
    receiver.clear()
    later = locate(ROOM)
    later.init(np.array(DST, np.int32), 0)
    units = [(0, len(DST))]
    write_parts(rank, model, units)
    for sender in range(2):
        report(decode, sender, units)
    assert wait_until(lambda: later.poll() == KVPoll.Success, PATIENCE)
    assert rank.has_received(model)
    assert gate.count == BUFFERS * (len(UNITS) + 1)


def test_pages_are_verified_after_they_are_interleaved(decode, rank, receiver, model):
    verified = []

    def verify(*request) -> None:
        verified.append(rank.has_received(model))

    decode.verify, receiver.expects_digests = verify, True
    write_parts(rank, model)
    report_all(decode)
    assert wait_until(lambda: receiver.poll() == KVPoll.Success, PATIENCE)
    assert verified == [True]


def test_request_without_chunks_to_interleave_succeeds_at_once(decode, rank, receiver, model):
    """Prefill is stock, or has `SGLANG_PD_PACKED=0`: it has sent slices."""
    for rows, arrived in zip(rank.rows, rank.expected_rows(model)):
        rows.copy_(arrived)
    for sender in range(2):
        report(decode, sender)
    assert receiver.poll() == KVPoll.Success
    assert rank.has_received(model) and "interleaver" not in vars(decode)


@pytest.mark.parametrize(
    "named, reason",
    [
        ((UNITS, [(0, 6)]), "2 of 2 prefill ranks report chunks"),
        ((UNITS, ()), "1 of 2 prefill ranks report chunks"),
        (([(0, 4), (3, 6)],) * 2, "overlap, have gaps, or leave the 6 pages"),
        (([(0, 4), (4, 7)],) * 2, "overlap, have gaps, or leave the 6 pages"),
    ],
)
def test_request_fails_if_prefill_ranks_name_other_chunks(
    decode, rank, receiver, gate, named, reason
):
    """Half of the heads would be in the wrong place."""
    for sender, units in enumerate(named):
        report(decode, sender, units)
    assert receiver.poll() == KVPoll.Failed
    said = fail_with_reason(receiver)
    assert "decode could not interleave KV heads: " in said and reason in said
    assert not gate.count and not any(rows.any() for rows in rank.rows)
    assert_nothing_kept(decode)


def test_request_fails_if_its_heads_cannot_be_interleaved(decode, receiver, monkeypatch):
    def fail(*_) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(interleaving, "interleave", fail)
    report_all(decode)
    assert wait_until(lambda: receiver.poll() == KVPoll.Failed, PATIENCE)
    assert fail_with_reason(receiver).endswith("decode could not interleave KV heads: no memory")
    assert_nothing_kept(decode)


@pytest.mark.parametrize("how", ["aborted", "failed elsewhere"])
def test_request_that_ends_early_waits_for_its_thread(decode, receiver, gate, how):
    """Its pages may be another request's afterwards; the thread writes no further buffer."""
    gate.open.clear()
    report_all(decode)
    assert receiver.poll() == KVPoll.WaitingForInput
    assert gate.entered.wait(PATIENCE)
    if how == "aborted":
        receiver.abort()
    else:
        receiver.fail_with_group()
    assert receiver.poll() == KVPoll.Failed
    with ThreadPoolExecutor(1) as scheduler:
        ending = scheduler.submit(fail_with_reason, receiver)
        assert not wait_until(ending.done, 0.2)
        gate.open.set()
        said = ending.result(PATIENCE)
    assert (ABORTED if how == "aborted" else "another decode rank failed") in said
    assert gate.count == 1
    assert_nothing_kept(decode)


@pytest.mark.parametrize("how", ["aborted", "failed elsewhere", "lost"])
def test_thread_stops_as_soon_as_its_request_fails(decode, receiver, gate, how):
    """Other requests wait for this thread; the request itself may end much later."""
    gate.open.clear()
    report_all(decode)
    assert receiver.poll() == KVPoll.WaitingForInput
    assert gate.entered.wait(PATIENCE)
    if how == "aborted":
        receiver.abort()
    elif how == "failed elsewhere":
        receiver.fail_with_group()
    else:
        decode.fail(ROOM, "prefill is lost")
        assert receiver.poll() == KVPoll.Failed
    gate.open.set()
    assert wait_until(receiver.interleaving.result.done, PATIENCE)
    assert gate.count == 1
    assert receiver.poll() == KVPoll.Failed
    fail_with_reason(receiver)
    assert_nothing_kept(decode)


def test_queued_interleaving_of_an_aborted_request_is_dropped(decode, receiver, gate):
    """Another request's is under way, for which it does not wait."""
    gate.open.clear()
    other = decode.interleaver.start(HEADS, UNITS, np.array(DST, np.int32), None)
    assert gate.entered.wait(PATIENCE)
    report_all(decode)
    assert receiver.poll() == KVPoll.WaitingForInput
    receiver.abort()
    assert ABORTED in fail_with_reason(receiver)
    gate.open.set()
    assert wait_until(other.is_done, PATIENCE)
    assert gate.count == BUFFERS * len(UNITS)


def test_unreadable_chunks_fail_the_request_once_all_senders_have_stopped(decode, receiver, gate):
    """NIXL: see `test_transfer_status`."""
    if not isinstance(decode, MooncakeKVManager):
        pytest.skip("Mooncake's message")
    decode._handle_status([b"%d" % ROOM, b"%d" % KVPoll.Success, b"0", b"no reason", b"", b"\xc1"])
    assert receiver.poll() == KVPoll.WaitingForInput and receiver.has_pending_transfers()
    report(decode, 1, UNITS)
    assert receiver.poll() == KVPoll.Failed
    assert "chunks to interleave cannot be read" in fail_with_reason(receiver)
    assert not gate.count
    assert_nothing_kept(decode)


def test_warning_of_different_tp_sizes_names_all_that_may_follow(rank, locate, monkeypatch):
    """Whether heads go packed or sliced is known only later."""
    said = []
    monkeypatch.setattr(receiver_module.logger, "warning_once", said.append, raising=False)
    locate(ROOM)
    (one,) = said
    assert "interleaved, packed, or sent token by token" in one


# Two TP ranks of a decode server, of which each has its own pools.


class TpGroup:
    """The TP group of two schedulers that run in threads."""

    def __init__(self):
        store, self.schedulers = dist.HashStore(), ThreadPoolExecutor(2)

        def join(rank: int) -> dist.ProcessGroup:
            return dist.ProcessGroupGloo(store, rank, 2)

        self.groups = list(self.schedulers.map(join, range(2)))

    def poll(self, receivers) -> list[int]:
        """Polls a request on both ranks; returns what each of them acts on."""

        def poll(receiver, group) -> int:
            (state,) = reduce_polls([receiver], [receiver.poll()], group)
            return state

        return list(self.schedulers.map(poll, receivers, self.groups))


@pytest.fixture
def both(decode, rank, receiver, another_decode, locate):
    """The managers of both ranks, and the request's receivers there."""
    give_pools(another_decode)
    other = locate(ROOM, at=another_decode)
    other.init(np.array(DST, np.int32), 0)
    return (decode, another_decode), (receiver, other)


@pytest.mark.parametrize("other_is", ["waiting", "failing"])
def test_rank_that_has_interleaved_waits_for_one_that_fails(both, gate, other_is):
    """It must not serve the request, nor keep it once the other rank has failed it."""
    (fast, slow), receivers = both
    group = TpGroup()
    report_all(fast)
    assert wait_until(lambda: receivers[0].poll() == KVPoll.Success, PATIENCE)
    if other_is == "waiting":
        report(slow, 0, UNITS)
    else:
        report_failure(slow, 0)
    for _ in range(3):
        assert group.poll(receivers) == [KVPoll.WaitingForInput] * 2
    assert receivers[1].has_pending_transfers()  # the other sender may still write
    report_failure(slow, 1)
    assert group.poll(receivers) == [KVPoll.Failed] * 2
    assert fail_with_reason(receivers[0]).endswith("another decode rank failed")
    assert fail_with_reason(receivers[1]).endswith("Prefill failed: no page")
    assert gate.count == BUFFERS * len(UNITS)
    for manager in (fast, slow):
        assert_nothing_kept(manager)


def test_rank_that_interleaves_keeps_its_pages_until_its_thread_stops(both, gate):
    """The other rank has failed the request."""
    (slow, failed), receivers = both
    group = TpGroup()
    gate.open.clear()
    report_all(slow)
    assert receivers[0].poll() == KVPoll.WaitingForInput
    assert gate.entered.wait(PATIENCE)
    for sender in range(2):
        report_failure(failed, sender)
    assert group.poll(receivers) == [KVPoll.Transferring] * 2  # the slow rank may still write
    assert group.poll(receivers) == [KVPoll.Failed] * 2
    with ThreadPoolExecutor(1) as scheduler:
        ending = scheduler.submit(fail_with_reason, receivers[0])
        assert not wait_until(ending.done, 0.2)
        assert fail_with_reason(receivers[1]).endswith("Prefill failed: no page")
        gate.open.set()
        assert ending.result(PATIENCE).endswith("another decode rank failed")
    assert gate.count == 1
    for manager in (slow, failed):
        assert_nothing_kept(manager)
