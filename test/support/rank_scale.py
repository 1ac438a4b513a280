"""A rank of the scale benchmark: it serves requests of one page, and reports what they cost.

Ranks write no KV to each other (`null_transfer`); the benchmark measures messages and threads.
"""

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rank_process
import requests
import zmq
from engine_release import RANK_MODULE
from null_transfer import use_null_transfer
from rank_base import failure
from rank_contents import AUX_SLOTS
from sglang.srt.disaggregation.base import KVPoll

release = importlib.import_module(RANK_MODULE)

# The loop below runs in every rank of one machine; its own time is left out of all figures.
POLL_SECONDS = 0.05
OPEN = 2  # open requests per decode rank
PAGE = [1]
STALLED_SECONDS = 120.0


class ActivityCounter:
    """Counts this process's messages and HTTP requests, and finds its reader threads."""

    def __init__(self):
        self.sent = self.asked = 0
        self.readers: set[threading.Thread] = set()
        send, receive, ask = zmq.Socket.send_multipart, zmq.Socket.recv_multipart, requests.Session

        def send_multipart(sock, *given, **options):
            self.sent += sock.type == zmq.PUSH
            return send(sock, *given, **options)

        def recv_multipart(sock, *given, **options):
            if sock.type == zmq.PULL:
                self.readers.add(threading.current_thread())
            return receive(sock, *given, **options)

        def asking(session, *given, send=ask.send, **options):
            self.asked += 1
            return send(session, *given, **options)

        zmq.Socket.send_multipart, zmq.Socket.recv_multipart = send_multipart, recv_multipart
        ask.send = asking

    def reader_seconds(self) -> float:
        """Returns the processor seconds of the threads that read messages."""
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in self.readers]
        return sum(map(time.clock_gettime, clocks))


class Rank(release.Rank):
    PREFILL_SECONDS = 60  # all decode ranks query prefill at once
    PREFILL_POLL_SECONDS = 0.1

    def __init__(self, config: dict):
        self.activity = ActivityCounter()
        self.scheduler_seconds = self.loop_seconds = 0.0
        use_null_transfer(config["backend"])
        super().__init__(config)
        self.dropped = 0
        self._keep_workers_alive(self.manager.check_status)

    def _keep_workers_alive(self, check: Callable) -> None:
        """Keeps stock's transfer workers alive, so that the other figures are comparable.

        A stock worker crashes, and serves no more rooms, if the scheduler drops the room that the
        worker checks.
        """

        def check_status(room: int):
            try:
                return check(room)
            except KeyError:
                self.dropped += 1
                return KVPoll.Failed

        self.manager.check_status = check_status

    def figures(self) -> dict:
        """Returns this process's figures since its start, and its private KiB now.

        `all_s`, `scheduler_s` and `reader_s` are processor seconds, without those of the loop in
        `serve`; `messages` and `asked_http`
        count sent messages and HTTP requests; `dropped` counts crashes that a stock transfer
        worker would have had.
        """
        rollup = Path("/proc/self/smaps_rollup").read_text().split("\n")
        return {
            "private_kib": sum(int(row.split()[1]) for row in rollup if row.startswith("Private_")),
            "all_s": time.process_time() - self.loop_seconds,
            "scheduler_s": self.scheduler_seconds,
            "reader_s": self.activity.reader_seconds(),
            "messages": self.activity.sent,
            "asked_http": self.activity.asked,
            "peers": len(getattr(self.manager, "decode_kv_args_table", ())),
            "dropped": self.dropped,
        }

    def serve(self, lanes: list[list[int]], seconds: float) -> dict:
        """Serves the rooms of each lane in order, `OPEN` at a time.

        Returns when all rooms have ended, after `seconds`, or when none has ended for
        `STALLED_SECONDS`.

        Args:
            lanes: [first room, last room + 1] of each lane; decode has one lane.

        Returns:
            `ends`, (room, start, end) on the machine's monotonic clock, and `lost`, (room, reason)
            of rooms that failed or are still open.
        """
        begun, scheduler_seconds = time.thread_time(), self.scheduler_seconds
        try:
            return self._serve(lanes, seconds)
        finally:
            of_scheduler = self.scheduler_seconds - scheduler_seconds
            self.loop_seconds += time.thread_time() - begun - of_scheduler

    def _serve(self, lanes: list[list[int]], seconds: float) -> dict:
        waiting, open_rooms, ends = [deque(range(*lane)) for lane in lanes], {}, []
        until, stalled, lost = time.monotonic() + seconds, time.monotonic() + STALLED_SECONDS, []
        begin = self._send if self.is_prefill else self._open
        while (any(waiting) or open_rooms) and time.monotonic() < min(until, stalled):
            for number, lane in enumerate(waiting):
                held = sum(of == number for of, *_ in open_rooms.values())
                while lane and held < OPEN:
                    room, held = lane.popleft(), held + 1
                    begun = time.monotonic()
                    open_rooms[room] = (number, begun, self._timed(begin, room))
            for room, (_, begun, request) in list(open_rooms.items()):
                state = self._poll_once(request)
                if state == "success":
                    ends.append((room, begun, time.monotonic()))
                elif state is not None:
                    lost.append((room, state))
                if state is not None:
                    stalled = time.monotonic() + STALLED_SECONDS
                    del open_rooms[room]
            time.sleep(POLL_SECONDS)
        lost += [(room, f"status {one['last']}") for room, (*_, one) in open_rooms.items()]
        return {"ends": ends, "lost": lost}

    def _timed(self, call: Callable, *given):
        """Counts a call's thread time as the scheduler's; see `_poll_once` for its polls."""
        begun = time.thread_time()
        result = call(*given)
        self.scheduler_seconds += time.thread_time() - begun
        return result

    def _send(self, room: int) -> dict:
        return {"room": room, "poller": self._sender(room), "last": None}

    def _open(self, room: int) -> dict:
        receiver = self._receiver(room)
        self._send_metadata(receiver, PAGE, room % AUX_SLOTS, None)
        return {"room": room, "poller": receiver, "last": None}

    def _poll_once(self, request: dict) -> str | None:
        """Polls a request; returns `success`, a failure reason, or None if it has not ended.

        A poll without a new state does not count as the scheduler's time.
        """
        poller, begun = request["poller"], time.thread_time()
        state = poller.poll()
        if state == request["last"]:
            return None
        self.scheduler_seconds += time.thread_time() - begun
        request["last"] = state
        if self.is_prefill and state == KVPoll.WaitingForInput:
            self._timed(poller.init, len(PAGE), request["room"] % AUX_SLOTS)
            self._timed(poller.send, np.array(PAGE, dtype=np.int32), None)
        elif state == KVPoll.Failed:
            return self._timed(failure, poller)["reason"]
        elif state == KVPoll.Success and hasattr(poller, "clear"):
            self._timed(poller.clear)
        return "success" if state == KVPoll.Success else None

    def rest(self, seconds: float) -> dict:
        """Idles for `seconds`; returns this process's processor seconds per second."""
        begun, spent = time.monotonic(), time.process_time()
        time.sleep(seconds)
        return {"part": (time.process_time() - spent) / (time.monotonic() - begun)}


if __name__ == "__main__":
    rank_process.main({"start": Rank, "bootstrap": release.bootstrap})
