"""What a rank process packs and interleaves: counts of it, faults in it, and commands for both."""

import threading
import time
from dataclasses import replace

from rank_contents import decode_slot
from rank_faults import INJECTED_ERROR
from sglang.srt.disaggregation.base import KVPoll

from pd_harness.polling import wait_until


class PackingCounts:
    """Counts what this process packs and interleaves from now on; in stock that is nothing.

    Attributes:
        packed: Rounds, each of which has filled a packing buffer.
        interleaved: Units, counted once for each buffer.
    """

    def __init__(self):
        self.packed = self.interleaved = 0
        self._lock = threading.Lock()
        try:
            from sglang.srt.disaggregation.pd import interleaving, packing
        except ImportError:  # stock has neither
            return
        packing.pack = self._counted(packing.pack, "packed")
        interleaving.interleave = self._counted(interleaving.interleave, "interleaved")

    def _counted(self, act, name: str):
        def counted(*args) -> None:
            act(*args)
            with self._lock:
                setattr(self, name, getattr(self, name) + 1)

        return counted


class InterleavingFaults:
    """Injects a fault into the interleaving of chosen buffers of one decode rank.

        wait         it starts after `seconds`
        exception    it raises

    Attributes:
        has_begun: Set once a buffer waits.
    """

    def __init__(self, manager):
        from sglang.srt.disaggregation.pd import interleaving

        self.plan()
        self._interleave, interleaving.interleave = interleaving.interleave, self._faulty

    def plan(self, how: str = "", at=(), seconds: float = 0.0) -> None:
        """Plans a fault at the buffers `at`, of which the next is 1; replaces earlier plans."""
        self._how, self._at, self._seconds = how, tuple(at), seconds
        self._calls, self.has_begun = 0, threading.Event()

    def _faulty(self, *args) -> None:
        self._calls += 1
        if self._calls in self._at:
            if self._how == "exception":
                raise RuntimeError(INJECTED_ERROR)
            self.has_begun.set()
            time.sleep(self._seconds)
        self._interleave(*args)


class PackingCommands:
    """Base of `rank_base.RankBase`: commands of the tests of packed transfers."""

    def shrink_packing_buffers(self, size: int) -> None:
        """Makes this prefill rank pack at most `size` bytes at a time.

        Call it while nothing is packed.
        """
        packing = self.manager.kv_args.packing
        packing.free = [tuple(half[:size] for half in halves) for halves in packing.free]

    def report_units(self, does: bool) -> None:
        """Makes this prefill rank report, or not, which chunks decode must interleave."""
        for info in self.manager.decode_kv_args_table.values():
            info.plan = replace(info.plan, needs_interleaving=does)

    def plan_interleaving_faults(self, **plan) -> None:
        self._instrument(InterleavingFaults).plan(**plan)

    def abort_while_interleaving(self, room: int, seconds: float) -> dict:
        """Aborts an opened room once one of its buffers waits (`plan_interleaving_faults`).

        Returns what `abort_after` does.
        """
        receiver, faults = self.open_pollers.pop(room), self._instrument(InterleavingFaults)

        def has_begun() -> bool:
            return self._poll(receiver) == KVPoll.Failed or faults.has_begun.is_set()

        if not wait_until(has_begun, seconds):
            return {"state": "not interleaved"}
        receiver.abort()
        return self._end_of_abort(receiver, seconds)

    def receive_at_once(self, requests: list, seconds: float) -> dict:
        """Runs several requests on decode at once, `[room, pages]` each, in slots of their own.

        Compares every byte of every buffer after the last one has ended.
        """
        metadata, receivers, ends = self.metadata.copies(), {}, {}
        for room, pages in requests:
            receivers[room] = self._receiver(room)
            state = self._state(room, pages)
            self._send_metadata(receivers[room], pages, decode_slot(room), state)

        def all_ended() -> bool:
            for room in receivers.keys() - ends:
                state = self._poll(receivers[room])
                if state == KVPoll.Success:
                    ends[room] = "success"
                elif state == KVPoll.Failed:
                    ends[room] = self._failed(receivers[room])["reason"]
            return len(ends) == len(receivers)

        wait_until(all_ended, seconds)
        lost = {room: ends.get(room, "hang") for room in receivers if ends.get(room) != "success"}
        if lost:
            return {"state": "failed", "reason": str(lost)}
        for room, pages in requests:
            self.kv.expect(room, pages)
            self.metadata.write(metadata, room, decode_slot(room))
        wrong = [*self.kv.unexpected(), *self.metadata.unexpected(metadata, ())]
        for receiver in receivers.values():
            receiver.clear()
        return {"state": "wrong" if wrong else "right", "reason": "; ".join(wrong[:4])}
