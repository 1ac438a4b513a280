"""No status of a room is lost when two threads update it at once."""

import threading

import pytest
from fake_managers import decode_rank, prefill_rank
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM, ADDRESS = 7, "127.0.0.1:8998"
PAUSE_SECONDS = 0.3  # of the first thread, at most


class PausingDict(dict):
    """A manager's statuses; the first thread to read one pauses until another has written it."""

    def __init__(self, states: dict):
        super().__init__(states)
        self.first, self.has_read, self.written = None, threading.Event(), threading.Event()

    def _pause_once(self) -> None:
        if self.first is None:
            self.first = threading.current_thread()
            self.has_read.set()
            self.written.wait(PAUSE_SECONDS)

    def get(self, room, default=None):
        state = super().get(room, default)
        self._pause_once()
        return state

    def __getitem__(self, room):
        state = super().__getitem__(room)
        self._pause_once()
        return state

    def __contains__(self, room) -> bool:
        is_known = super().__contains__(room)
        if not is_known:
            self._pause_once()
        return is_known

    def __setitem__(self, room, state):
        super().__setitem__(room, state)
        if threading.current_thread() is not self.first:
            self.written.set()


class DroppingDict(dict):
    """A manager's statuses; drops a room after each check for it, as another thread might."""

    def __contains__(self, room) -> bool:
        is_known = super().__contains__(room)
        self.pop(room, None)
        return is_known


def race(prefill, before: dict, first: KVPoll, second: KVPoll, update) -> KVPoll:
    """The status after two threads update it, the second during the first one's update."""
    states = prefill.request_status = PausingDict(before)
    threads = [threading.Thread(target=update, args=(prefill, ROOM, to)) for to in (first, second)]
    threads[0].start()
    assert states.has_read.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return dict.get(states, ROOM)


OPEN = {ROOM: KVPoll.Bootstrapping}
CASES = {
    "both threads open the room": ({}, KVPoll.Bootstrapping, KVPoll.WaitingForInput),
    "metadata arrives, room fails": (OPEN, KVPoll.WaitingForInput, KVPoll.Failed),
    "metadata arrives, room succeeds": (OPEN, KVPoll.WaitingForInput, KVPoll.Success),
}
cases = pytest.mark.parametrize("before, first, second", CASES.values(), ids=CASES)


@cases
def test_concurrent_updates_keep_the_later_status(before, first, second, prefill):
    assert race(prefill, before, first, second, type(prefill).update_status) == second


@cases
def test_stock_loses_a_concurrent_update(before, first, second):
    stock = common.EngineCommonKVManager.update_status
    assert race(prefill_rank("nixl"), before, first, second, stock) == first


def test_room_dropped_during_a_node_failure_does_not_raise():
    """Decode's thread that watches prefill servers checks rooms that may just have ended."""
    decode = decode_rank("mooncake")
    decode.request_status = DroppingDict({ROOM: KVPoll.WaitingForInput})
    decode.addr_to_rooms_tracker[ADDRESS].add(ROOM)
    decode.heartbeat_failures = {}
    with pytest.raises(KeyError):
        common.EngineCommonKVManager.check_status(decode, ROOM + 1)
    decode._handle_node_failure(ADDRESS)
    assert not dict(decode.request_status)


def test_failed_is_final_and_a_cleared_room_stays_cleared(prefill):
    for state in (KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Success):
        prefill.update_status(ROOM, state)
    assert prefill.request_status == {ROOM: KVPoll.Failed}
    prefill.request_status.clear()
    prefill.update_status(ROOM, KVPoll.Failed)
    assert prefill.request_status == {}
