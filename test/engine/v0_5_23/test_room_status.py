"""No status of a room is lost when two threads update it at once."""

import threading

import fake_managers
import pytest
from fake_managers import BACKENDS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common import conn as common

from pd_harness.polling import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM, ADDRESS = 7, "127.0.0.1:8998"
PAUSE_SECONDS = 0.3  # of the first thread, at most


class PausingDict(dict):
    """A manager's statuses; the first thread to read one pauses until another has written it."""

    def __init__(self, states: dict):
        super().__init__(states)
        self.first, self.has_read, self.written = None, threading.Event(), threading.Event()

    def get(self, room, default=None):
        state = super().get(room, default)
        if self.first is None:
            self.first = threading.current_thread()
            self.has_read.set()
            self.written.wait(PAUSE_SECONDS)
        return state

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


def race(backend: str, before: dict, first: KVPoll, second: KVPoll, update=None) -> KVPoll:
    """The status after two threads update it, the second during the first one's update."""
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    states = prefill.request_status = PausingDict(before)
    update = update or type(prefill).update_status
    threads = [threading.Thread(target=update, args=(prefill, ROOM, to)) for to in (first, second)]
    threads[0].start()
    assert states.has_read.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert wait_until(lambda: not any(thread.is_alive() for thread in threads), 1)
    return dict.get(states, ROOM)


CASES = {
    "both threads open the room": (
        {},
        KVPoll.Bootstrapping,
        KVPoll.WaitingForInput,
        KVPoll.WaitingForInput,
    ),
    "metadata arrives, room fails": (
        {ROOM: KVPoll.Bootstrapping},
        KVPoll.WaitingForInput,
        KVPoll.Failed,
        KVPoll.Failed,
    ),
    "metadata arrives, room succeeds": (
        {ROOM: KVPoll.Bootstrapping},
        KVPoll.WaitingForInput,
        KVPoll.Success,
        KVPoll.Success,
    ),
}
cases = pytest.mark.parametrize("before, first, second, last", CASES.values(), ids=CASES)


@backends
@cases
def test_concurrent_updates_keep_the_later_status(backend, before, first, second, last):
    assert race(backend, before, first, second) == last


@cases
def test_stock_loses_a_concurrent_update(before, first, second, last):
    stock = common.EngineCommonKVManager.update_status
    assert race("nixl", before, first, second, stock) == first != last


def test_room_dropped_during_a_node_failure_does_not_raise():
    """Decode's thread that watches prefill servers checks rooms that may just have ended."""
    decode = fake_managers.make_manager(
        "mooncake", fake_managers.mla_layout(), fake_managers.DECODE
    )
    decode.request_status = DroppingDict({ROOM: KVPoll.WaitingForInput})
    decode.addr_to_rooms_tracker[ADDRESS].add(ROOM)
    decode.heartbeat_failures = {}
    with pytest.raises(KeyError):
        common.EngineCommonKVManager.check_status(decode, ROOM + 1)
    decode._handle_node_failure(ADDRESS)
    assert not dict(decode.request_status)


@backends
def test_failed_is_final_and_a_cleared_room_stays_cleared(backend):
    prefill = fake_managers.make_manager(backend, fake_managers.mla_layout())
    for state in (KVPoll.WaitingForInput, KVPoll.Failed, KVPoll.Success):
        prefill.update_status(ROOM, state)
    assert prefill.request_status == {ROOM: KVPoll.Failed}
    prefill.request_status.clear()
    prefill.update_status(ROOM, KVPoll.Failed)
    assert prefill.request_status == {}
