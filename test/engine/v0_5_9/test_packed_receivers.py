"""Decode: a request succeeds only once the heads that arrived as whole rows are interleaved.

Two prefill ranks of TP 2 send to one decode rank; both backends.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import packed_ranks
import pytest
import torch
from packed_ranks import DST, HEADS, LAYERS, PAGE, SRC, UNITS, Rank, slots_of
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.kv_layout import LayoutError, Notification, encode_units
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.pd import interleaving
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
    made = Rank(0, 1)
    vars(decode.kv_args).update(vars(made.args))
    server.sizes |= {"prefill_attn_tp_size": HEADS, "prefill_page_size": PAGE}
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
        (([(0, 4), (3, 6)],) * 2, "overlap or leave the 6 pages"),
        (([(0, 4), (4, 7)],) * 2, "overlap or leave the 6 pages"),
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


def test_unreadable_chunks_are_refused(decode, receiver):
    """Mooncake's thread drops such a message. NIXL: see `test_transfer_status`."""
    if not isinstance(decode, MooncakeKVManager):
        pytest.skip("Mooncake's message")
    frames = [b"%d" % ROOM, b"%d" % KVPoll.Success, b"0", b"no reason", b"", b"\xc1"]
    with pytest.raises(LayoutError, match="chunks to interleave cannot be read"):
        decode._handle_status(frames)
    assert receiver.poll() == KVPoll.WaitingForInput
