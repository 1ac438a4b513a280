"""Attacks on one of two decode ranks while it has open requests; the other one is served.

Data go over TCP, as between hosts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from fleet import Fleet, Rank, Servers, Side
from rank_faults import kill

from pd_harness.polling import is_in_time, wait_until

OPEN_REQUESTS = 40  # requests of the attacked rank
LIVE_REQUESTS = 6  # requests of the other rank, one after the other, from the attack on
LIVE_PAUSE = 1.5
SILENT_SECONDS = 5
NOTICED_SECONDS = SILENT_SECONDS + 6  # ZeroMQ notices within 5 s that a process is stopped
SERVED_SECONDS = 4  # Mooncake's first write waits up to a second for the harness's write lock
PAUSE_SECONDS = 1.0  # a scheduler that waits for a peer waits five seconds or more
LONG_SECONDS = 60
DECODE_SECONDS = 30  # for which decode waits for a request
RECOVERY_SECONDS = 60  # TCP waits ever longer before it retransmits lost packets
CLOSE_SECONDS = 1.0  # between a peer's loss and closing its socket; the default is a minute
SETTLED_SECONDS = 10
SLOW_CYCLE = (1.0, 0.2)  # seconds in which a process is stopped, and in which it runs
# By default stock assigns decode ranks to four queues by their ports, and only every fourth rank
# would wait for the attacked one.
ONE_QUEUE = {"SGLANG_DISAGGREGATION_QUEUE_SIZE": "1"}
TCP = {"UCX_TLS": "tcp"}  # over shared memory, writes to a stopped process succeed


def attacked_fleet(
    backend: str,
    prefill_tp: int = 2,
    waiting_seconds: int = DECODE_SECONDS,
    open_requests: int = OPEN_REQUESTS,
    **more: str,
) -> Fleet:
    """Returns a fleet whose decode waits so long for a request; `more` are its variables."""
    environment = {"SGLANG_PD_SILENT_SECONDS": str(SILENT_SECONDS), **more}
    waiting = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(waiting_seconds)}
    return Fleet(
        prefill=Side(tp=prefill_tp, environment=environment),
        decode=Side(environment={**environment, **waiting}),
        backend=backend,
        pages=open_requests + LIVE_REQUESTS + 1,
        page_size=64,
        layers=4,
        v_width=4,  # as wide as K, or else stock sends wrong bytes
    )


@contextlib.contextmanager
def killed(attacked: AttackedFleet, victim: Rank) -> Iterator[None]:
    kill(victim.pid)
    yield


@contextlib.contextmanager
def stopped(attacked: AttackedFleet, victim: Rank) -> Iterator[None]:
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(victim.pid, signal.SIGCONT)


@contextlib.contextmanager
def slow(attacked: AttackedFleet, victim: Rank) -> Iterator[None]:
    ended = threading.Event()

    def stand_still_and_run() -> None:
        while not ended.is_set():
            with stopped(attacked, victim):
                time.sleep(SLOW_CYCLE[0])
            time.sleep(SLOW_CYCLE[1])

    thread = threading.Thread(target=stand_still_and_run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def under_attack(victim: Rank, what: str) -> Iterator[None]:
    """Changes how the victim receives; see `rank_attacks`."""
    victim.call("attack", what=what)
    try:
        yield
    finally:
        victim.call("attack", what="")


@contextlib.contextmanager
def cut_off(attacked: AttackedFleet, victim: Rank) -> Iterator[None]:
    with under_attack(victim, "packets vanish"):
        yield


@contextlib.contextmanager
def reads_nothing(attacked: AttackedFleet, victim: Rank) -> Iterator[None]:
    """The victim reads none of many queued messages, while ZeroMQ answers heartbeats."""
    with under_attack(victim, "messages stay unread"):
        port = victim.call("health")["port"]
        for rank in attacked.servers.prefill:
            assert rank.call("flood", port=port)["sent"] > 1000
        yield


@contextlib.contextmanager
def restarted_twice(attacked: AttackedFleet, victim: Rank) -> Iterator[None]:
    """Kills the victim, and its successor as soon as that one has served a request."""
    kill(victim.pid)
    kill(attacked.start_victim().pid)
    attacked.alive.add(attacked.start_victim())
    yield


ATTACKS: dict[str, Callable] = {
    "killed": killed,
    "restarted twice": restarted_twice,
    "stopped": stopped,
    "packets vanish": cut_off,
    "slow": slow,
    "reads nothing": reads_nothing,
}


class AttackedFleet:
    """A fleet whose decode ranks are attacked one after the other, except for `other`.

    Attributes:
        open_requests: How many requests of the attacked rank are open.
    """

    def __init__(self, servers: Servers):
        self.servers = servers
        self.open_requests = servers.fleet.pages - LIVE_REQUESTS - 1
        (self.other,) = servers.decode
        self.alive = {self.other}
        self.gone = 0  # lost ranks of earlier attacks that prefill still keeps

    def start_victim(self) -> Rank:
        """Starts a decode rank to attack; asserts that both decode ranks are served."""
        (victim,) = self.servers.start_another("decode")
        assert all(self.is_served(rank, 20) for rank in (victim, self.other))
        return victim

    def is_served(self, rank: Rank, seconds: float) -> bool:
        """Sends one request to the rank; returns whether it is right within `seconds`."""
        requests = self._new_requests(1)
        with ThreadPoolExecutor() as pool:
            sent = self._sending(pool, requests, seconds)
            answer = self.servers.receive(rank, *requests[0], seconds)
            ends = [one.result()["ends"][0]["state"] for one in sent]
        return answer["state"] == "right" and set(ends) == {"success"}

    def is_served_again(self, victim: Rank, seconds: float) -> bool:
        """Like `is_served`, but accepts bytes of earlier requests that arrived late."""
        victim.call("rebaseline")
        return self.is_served(victim, seconds)

    def open_rooms(self, victim: Rank) -> list:
        """Opens `open_requests` requests of the victim; returns `[room, pages]` of each."""
        requests = self._new_requests(self.open_requests, first_page=0)
        for room, pages in requests:
            victim.call("open_room", room=room, pages=pages)
        # An attacked rank may send no more messages, so prefill must have read them by then.
        assert wait_until(self._all_asked, 10)
        return requests

    def attack(
        self,
        attack: Callable,
        victim: Rank,
        seconds: float,
        live_ones: int = LIVE_REQUESTS,
        live_pause: float = LIVE_PAUSE,
    ) -> dict:
        """Attacks the victim while it has `open_requests` open requests; returns measurements.

        Args:
            seconds: Limit for all of prefill's requests together, and for each live request.
            live_pause: Seconds after each live request.
        """
        opened, live = self.open_rooms(victim), self._new_requests(live_ones)
        served: list[dict] = []
        with attack(self, victim), ThreadPoolExecutor() as pool:
            sent = self._sending(pool, [*opened, *live], seconds)
            for room, pages in live:
                served.append(self.servers.receive(self.other, room, pages, seconds))
                if served[-1]["state"] != "right":
                    break
                time.sleep(live_pause)
            answers = [one.result() for one in sent]
        return {
            "rooms": [room for room, _ in opened],
            "served": served,
            "ends": [end for answer in answers for end in answer.get("ends", ())[: len(opened)]],
            "pause": max(answer.get("pause", 0) for answer in answers),
            "raised": [answer["reason"] for answer in answers if answer["state"] == "raised"],
        }

    def survive(
        self,
        case: str,
        live_ones: int = LIVE_REQUESTS,
        recovery: tuple[float, float] = (RECOVERY_SECONDS, DECODE_SECONDS),
    ) -> dict:
        """Returns an attack's measurements; asserts that a surviving victim is served again.

        Args:
            recovery: Seconds after which it is served at the latest, and limit of each request.
        """
        victim = self.start_victim()
        found = self.attack(ATTACKS[case], victim, LONG_SECONDS, live_ones)
        assert_unharmed(case, found)
        if case not in ("killed", "restarted twice"):
            self.alive.add(victim)
            limit = 2 * DECODE_SECONDS
            ends = victim.call("wait_for_rooms", rooms=found["rooms"], seconds=limit)["ends"]
            assert {end["state"] for end in ends} <= {"failed", "success"}, (case, ends)
            latest, limit = recovery
            assert wait_until(lambda: self.is_served_again(victim, limit), latest, 0.5), case
        return found

    def leftover_counts(self) -> dict[str, int]:
        """Counts rooms in the tables of prefill's ranks, and lost decode ranks that they keep."""
        prefill = self.servers.prefill
        rooms = sum(sum(rank.call("room_counts").values()) for rank in prefill)
        peers = max(rank.call("health")["peers"] for rank in prefill)
        return {"rooms": rooms, "exited ranks": max(0, peers - len(self.alive) - self.gone)}

    def leftover_counts_after_close(self) -> dict[str, int]:
        """Returns `leftover_counts` after prefill has closed its sockets to lost peers."""
        self._set_close_delay(CLOSE_SECONDS)
        wait_until(lambda: not self.leftover_counts()["rooms"], SETTLED_SECONDS)
        self._set_close_delay(60)
        held = self.leftover_counts()
        self.gone += held["exited ranks"]
        return held

    def _new_requests(self, count: int, first_page: int | None = None) -> list:
        """Returns `[room, pages]` of each new request, of one page each."""
        first_page = self.open_requests if first_page is None else first_page
        return [[next(self.servers.rooms), [first_page + at]] for at in range(count)]

    def _all_asked(self) -> bool:
        return all(
            rank.call("room_counts")["transfer_infos"] == self.open_requests
            for rank in self.servers.prefill
        )

    def _sending(self, pool: ThreadPoolExecutor, given: list, seconds: float) -> list[Future]:
        return [
            pool.submit(rank.call, "send_at_once", requests=given, seconds=seconds)
            for rank in self.servers.prefill
        ]

    def _set_close_delay(self, seconds: float) -> None:
        for rank in self.servers.prefill:
            rank.call("set_constants", module="peer_sockets", CLOSE_AFTER_SECONDS=seconds)


def assert_unharmed(case: str, found: dict) -> None:
    """Asserts by measurements of `AttackedFleet.attack` that only the victim was affected."""
    assert {one["state"] for one in found["served"]} == {"right"}, (case, found["served"])
    slowest = max(one["seconds"] for one in found["served"])
    assert is_in_time(slowest, SERVED_SECONDS), (case, slowest)
    assert is_in_time(found["pause"], PAUSE_SECONDS), (case, found["pause"])
    assert not found["raised"], (case, found["raised"])
    states = {end["state"] for end in found["ends"]}
    assert states <= ({"success"} if case == "slow" else {"failed", "success"}), (case, states)
    for end in found["ends"]:
        assert end["state"] == "success" or is_in_time(end["seconds"], NOTICED_SECONDS), (case, end)
