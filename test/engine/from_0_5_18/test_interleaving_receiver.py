"""Decode interleaves the chunks that prefill names, before the request can be read or verified.

Two prefill ranks send real memory to one decode rank, by the real managers over fake transfer
libraries; a thread of decode interleaves, which a gate may hold.
"""

import contextlib
import functools
import threading
from types import SimpleNamespace
from unittest import mock

import fake_managers
import numpy as np
import pytest
from engine_release import IS_0_5_18
from fake_managers import GQA_PAGE, GQA_PAGES, add_chunk, gqa_layout, process_messages, run_worker
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import encode_units, page_slots
from sglang.srt.disaggregation.pd import interleaving
from sglang.srt.disaggregation.pd.unit_exchange import UNITS

from pd_harness.polling import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM, OTHER_ROOM, ADDRESS = 7, 9, "127.0.0.1:8998"
PATIENCE = 10.0
SRC, DST = (9, 2, 3, 4), (5, 6, 1, 0)  # the request's pages
WINDOW = (8, 3), (2, 7)  # its pages of layers with windows
TWO_CHUNKS = ((0, 2), (2, 4))
BUFFERS = 4  # of KV; as many of layers with windows


def buffers(manager) -> list[np.ndarray]:
    """A rank's buffers of KV, then of windows, each `[slots, bytes per token]`."""
    views = manager.kv_args.views
    return [pages.numpy().reshape(GQA_PAGES * GQA_PAGE, -1) for pages in (*views.kv, *views.state)]


class Fleet:
    """Two prefill ranks, TP 2, and the decode rank, TP 1, that interleaves what they send.

    Attributes:
        expected: Decode's buffers, once all has arrived that was sent.
    """

    def __init__(self, backend: str, whole_rows: bool = True, has_windows: bool = False):
        self.backend, self.has_windows = backend, has_windows
        self.prefills = [
            fake_managers.prefill_rank(backend, gqa_layout((rank, 2), whole_rows, has_windows))
            for rank in (0, 1)
        ]
        self.decode = fake_managers.decode_rank(
            backend, gqa_layout((0, 1), whole_rows, has_windows)
        )
        for seed, manager in enumerate((*self.prefills, self.decode)):
            fake_managers.give_memory(manager, seed)
        self.expected = [one.copy() for one in buffers(self.decode)]
        for prefill in self.prefills:
            fake_managers.move_bytes(prefill)
            fake_managers.register(prefill, self.decode)
        info = self.decode.placeholder_prefill_info()
        info.attn_tp_size, info.target_tp_rank, info.required_prefill_response_num = 2, 0, 2
        info.target_tp_ranks, info.target_cp_ranks, info.target_pp_ranks = [0, 1], [0], [0]
        info.required_dst_info_num = 1
        self.decode.prefill_info_table[ADDRESS] = info
        common = {"rank_ip": "127.0.0.1", "pp_rank": 0, "is_dummy": False, "verifies": True}
        ranks = [{**common, "rank_port": number} for number in (0, 1)]
        self.decode.connection_pool[f"{ADDRESS}_0_0_0"] = ranks

    def request(self, room: int = ROOM, pages=DST):
        """Requests a room from both prefill ranks; returns decode's receiver."""
        for prefill in self.prefills:
            prefill.request_status[room] = KVPoll.Bootstrapping
        receiver = fake_managers.RECEIVERS[self.backend](self.decode, ADDRESS, room)
        receiver._connect_to_bootstrap_server = self.connect
        if IS_0_5_18:  # which aborts over sockets of its own
            receiver._send_abort_notification = lambda: None
        receiver.init(0)
        state = [list(WINDOW[1])] if self.has_windows else None
        receiver.send_metadata(np.array(pages, np.int32), 0, state)
        return receiver

    def connect(self, rank: dict):
        """Returns what stands for a socket to a prefill rank, and for its lock."""
        read = functools.partial(process_messages, self.prefills[rank["rank_port"]])
        return SimpleNamespace(send_multipart=read), contextlib.nullcontext()

    def send(self, room: int = ROOM, chunks=TWO_CHUNKS) -> list[list[bytes]]:
        """Sends a request's chunks; returns prefill's messages to decode, rank after rank."""
        messages = []
        *most, (first, stop) = chunks
        state = {"state_indices": [list(WINDOW[0])]} if self.has_windows else {}
        for prefill in self.prefills:
            for start, end in most:
                add_chunk(prefill, room, SRC[start:end], start, is_last=False)
            add_chunk(prefill, room, SRC[first:stop], first, **state)
            run_worker(prefill)
            messages += [frames for _, frames in prefill.notified]
            prefill.notified.clear()
        pages = [SRC[start:end] for start, end in chunks], [DST[start:end] for start, end in chunks]
        self.expect(range(BUFFERS), *(sum(side, ()) for side in pages))
        self.expect(range(BUFFERS, len(self.expected)), *WINDOW)
        return messages

    def expect(self, numbers, src, dst) -> None:
        """Expects pages of prefill, in which its ranks hold the lower and the upper heads."""
        own, theirs = (page_slots(pages, GQA_PAGE) for pages in (src, dst))
        for number in numbers:
            halves = [buffers(prefill)[number][own] for prefill in self.prefills]
            self.expected[number][theirs] = np.concatenate(halves, axis=1)

    def deliver(self, messages: list[list[bytes]]) -> None:
        process_messages(self.decode, *messages)

    def has_all_bytes(self) -> bool:
        return all(map(np.array_equal, buffers(self.decode), self.expected))


@pytest.fixture
def fleet(backend, published):
    return Fleet(backend)


class Gate:
    """Holds the thread that interleaves before each buffer, until it opens.

    Attributes:
        count: How many buffers have reached it.
    """

    def __init__(self):
        self.count = 0
        self.opened = threading.Event()
        self.interleave = interleaving.interleave

    def __call__(self, *given):
        self.count += 1
        assert self.opened.wait(PATIENCE)
        self.interleave(*given)

    def is_reached(self) -> bool:
        return wait_until(lambda: self.count, PATIENCE, 0.01) > 0


@pytest.fixture
def gate(monkeypatch):
    made = Gate()
    monkeypatch.setattr(interleaving, "interleave", made)
    yield made
    made.opened.set()


def reaches(receiver, status: int) -> bool:
    return wait_until(lambda: receiver.poll() == status, PATIENCE, 0.01)


# A request that arrives

CHUNKS = [
    ((0, 4),),
    TWO_CHUNKS,
    ((0, 1), (1, 1), (1, 4), (4, 4)),  # two without pages, the last one, too
]


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_all_bytes_are_in_their_place_when_a_request_succeeds(chunks, has_windows, backend):
    fleet = Fleet(backend, has_windows=has_windows)
    receiver = fleet.request()
    fleet.deliver(fleet.send(chunks=chunks))
    assert not fleet.has_all_bytes()
    assert reaches(receiver, KVPoll.Success)
    assert fleet.has_all_bytes()


def test_windows_are_interleaved_if_decode_has_all_other_pages(backend):
    """Decode has the whole prompt in its radix tree."""
    fleet = Fleet(backend, has_windows=True)
    receiver = fleet.request(pages=())
    fleet.deliver(fleet.send(chunks=[(0, 0)]))
    assert reaches(receiver, KVPoll.Success)
    assert fleet.has_all_bytes()


def test_request_waits_for_its_thread(fleet, gate):
    receiver = fleet.request()
    messages = fleet.send()
    fleet.deliver(messages[:-1])
    assert receiver.poll() == KVPoll.WaitingForInput and not gate.count
    fleet.deliver(messages[-1:])
    assert receiver.poll() == KVPoll.Transferring
    assert gate.is_reached()
    assert receiver.poll() == KVPoll.Transferring
    gate.opened.set()
    assert reaches(receiver, KVPoll.Success)


def test_request_is_interleaved_once(fleet, gate):
    gate.opened.set()
    receiver = fleet.request()
    messages = fleet.send()
    fleet.deliver(messages)
    assert reaches(receiver, KVPoll.Success)
    fleet.deliver(messages)  # as if each came twice
    assert receiver.poll() == receiver.poll() == KVPoll.Success
    assert gate.count == len(TWO_CHUNKS) * BUFFERS
    receiver.clear()
    assert not fleet.decode.arrived_units
    assert fleet.has_all_bytes()


def test_request_without_chunks_to_interleave_succeeds_at_once(backend):
    fleet = Fleet(backend, whole_rows=False)
    receiver = fleet.request()
    fleet.deliver(fleet.send())
    assert receiver.poll() == KVPoll.Success
    assert fleet.has_all_bytes()
    assert "interleaver" not in vars(fleet.decode)  # it has no thread


@pytest.mark.parametrize("reason", [None, "KV differs"])
def test_pages_are_verified_after_they_are_interleaved(reason, fleet, gate):
    verified = []

    def compare(*_):
        verified.append(fleet.has_all_bytes())
        return reason

    reports = mock.MagicMock()
    reports.report_for.return_value.failed = 0
    fleet.decode.kv_args.verifier = SimpleNamespace(compare=compare, reports=reports)
    receiver = fleet.request()
    fleet.deliver(fleet.send())
    assert receiver.poll() == KVPoll.Transferring
    assert gate.is_reached() and not verified
    gate.opened.set()
    assert reaches(receiver, KVPoll.Failed if reason else KVPoll.Success)
    assert verified == [True]


# Chunks that cannot be interleaved


def named(units, tp_size: int = 2):
    """A function that names other chunks in a message."""
    return lambda frames: [*frames[:3], b"%d" % tp_size, encode_units(units)]


def unchanged(frames):
    return frames


# What happens to the chunks that each rank names, and the reason; None for a message that is lost.
FAULTS = {
    "one rank names none": (unchanged, None, "1 of 2 prefill ranks report chunks to interleave"),
    "ranks differ": (unchanged, named([(0, 3), (3, 4)]), "2 of 2 prefill ranks report chunks"),
    "TP sizes differ": (unchanged, named(TWO_CHUNKS, 4), "report TP size [4], but their server"),
    "another server's TP size": (named(TWO_CHUNKS, 4),) * 2 + ("their server registered 2",),
    "overlap": (named([(0, 3), (2, 4)]),) * 2 + ("have gaps, or leave the 4 pages",),
    "more pages": (named([(0, 2), (2, 5)]),) * 2 + ("have gaps, or leave the 4 pages",),
}


@pytest.mark.parametrize("first, second, reason", FAULTS.values(), ids=FAULTS)
def test_request_fails_if_its_chunks_are_unclear(first, second, reason, fleet, gate):
    receiver = fleet.request()
    changes = {b"0": first, b"1": second}  # by the rank that names them
    for frames in fleet.send():
        change = changes[frames[2]] if frames[0] == UNITS else unchanged
        if change is not None:
            fleet.deliver([change(frames)])
    assert receiver.poll() == KVPoll.Failed
    said = fake_managers.finish_failed(receiver)
    assert said.startswith("decode could not interleave KV heads: ")
    assert reason in said
    assert not gate.count and not fleet.decode.arrived_units


@pytest.mark.parametrize("is_announced", [True, False])
def test_request_fails_if_the_messages_that_name_its_chunks_are_lost(is_announced, fleet, gate):
    """Only ranks that announce to name chunks always do; others send slices without a word."""
    for rank in fleet.decode.connection_pool[f"{ADDRESS}_0_0_0"]:
        rank["names_units"] = is_announced
    receiver = fleet.request()
    fleet.deliver([frames for frames in fleet.send() if frames[0] != UNITS])
    assert receiver.poll() == (KVPoll.Failed if is_announced else KVPoll.Success)
    if is_announced:
        assert "0 of 2 prefill ranks named the chunks" in fake_managers.finish_failed(receiver)


def test_request_fails_with_its_thread(fleet, monkeypatch):
    def fail(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(interleaving, "interleave", fail)
    receiver = fleet.request()
    fleet.deliver(fleet.send())
    assert reaches(receiver, KVPoll.Failed)
    said = fake_managers.finish_failed(receiver)
    assert said == "decode could not interleave KV heads: device lost"


# Requests that end meanwhile


@pytest.mark.parametrize("is_aborted", [True, False])
def test_request_that_is_cleared_waits_for_its_thread(is_aborted, fleet, gate):
    """Its pages are freed then. It is only cleared if it has failed on another rank."""
    receiver = fleet.request()
    fleet.deliver(fleet.send())
    assert receiver.poll() == KVPoll.Transferring
    assert gate.is_reached()
    job = receiver.interleaving
    if is_aborted:
        receiver.abort()  # which does not wait
        assert job.is_cancelled and not job.result.done()
    ending = threading.Thread(target=receiver.clear, daemon=True)
    ending.start()
    assert wait_until(lambda: job.is_cancelled, PATIENCE, 0.01)
    assert ending.is_alive() and not job.result.done()
    gate.opened.set()
    ending.join(PATIENCE)
    assert not ending.is_alive() and job.result.done()
    assert gate.count == 1  # the other buffers are not touched
    assert receiver.poll() == KVPoll.Failed


def test_request_that_ends_does_not_wait_for_others(fleet, gate):
    held = fleet.request()
    fleet.deliver(fleet.send())
    assert held.poll() == KVPoll.Transferring
    assert gate.is_reached()
    queued = fleet.request(OTHER_ROOM)
    fleet.deliver(fleet.send(OTHER_ROOM))
    assert queued.poll() == KVPoll.Transferring
    queued.abort()
    assert queued.poll() == KVPoll.Failed
    gate.opened.set()
    assert reaches(held, KVPoll.Success)
    assert gate.count == len(TWO_CHUNKS) * BUFFERS


def test_chunks_of_an_ended_request_are_dropped(fleet, gate):
    """A later request in the room is sent slices; it is not interleaved."""
    receiver = fleet.request()
    messages = fleet.send()
    fleet.deliver([frames for frames in messages if frames[0] == UNITS])
    receiver.abort()
    receiver.clear()
    fleet.deliver(messages)  # late
    assert not fleet.decode.arrived_units
    later = fleet.request()
    fleet.deliver([frames for frames in messages if frames[0] != UNITS])
    assert later.poll() == KVPoll.Success
    assert not gate.count


def test_second_clear_keeps_the_chunks_of_the_next_request(fleet):
    """The engine clears a failed request again when it frees its pages."""
    receiver = fleet.request()
    receiver.clear()
    later = fleet.request()
    fleet.deliver(fleet.send())
    receiver.clear()
    assert reaches(later, KVPoll.Success)
    assert fleet.has_all_bytes()
