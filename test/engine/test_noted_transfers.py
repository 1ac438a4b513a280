"""What managers, the scheduler's queues and transfer engines note for metrics."""

import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.disaggregation.pd import noted_requests, transfer_meter
from sglang.srt.disaggregation.pd.noted_requests import QueuedRequests
from sglang.srt.disaggregation.pd.noted_transfers import NotedTransfers
from sglang.srt.disaggregation.pd.server_names import resolved_name
from sglang.srt.disaggregation.pd.transfer_meter import MeteredAgent, MeteredEngine, Sending
from sglang.srt.disaggregation.transfer_log import TransferLog

pytestmark = pytest.mark.engine

ROOM, RANK, SERVER = 7, "rank", "10.0.0.2:30000"
BLOCKS = np.array([[0, 10, 0], [100, 20, 0]], np.uint64)
SENT = (ROOM, SERVER, "kv", "engine", 30, 2)


@pytest.fixture
def log():
    """A log that keeps events, and which nothing empties."""
    made = TransferLog()
    made._events = deque()
    return made


def noted(log: TransferLog, *names: str) -> list[tuple]:
    """The events of these names, or all: each one's name and facts."""
    found = [(happened.__name__, *facts) for happened, _, facts in log._events]
    return [one for one in found if not names or one[0] in names]


# Servers


@pytest.mark.parametrize(
    "address, name",
    [
        *((f"{host}:8998", "127.0.0.1:8998") for host in ("localhost", "127.5.6.7", "0.0.0.0")),
        ("[::1]:08998", "127.0.0.1:8998"),
        ("10.0.0.1:8998", "10.0.0.1:8998"),
        ("[::ffff:10.0.0.1]:8998", "10.0.0.1:8998"),
        ("[fd00:0::7]:8998", "[fd00::7]:8998"),
        *((one, "") for one in ("a..b:8998", "10.0.0.1:port", "10.0.0.1", "")),
    ],
)
def test_server_has_one_name_however_it_is_spelled(address, name):
    assert resolved_name(address) == name


def test_prefill_server_with_many_addresses_counts_once(log):
    manager = NotedTransfers()
    manager.transfer_log = log
    kinds = {"localhost:8998": "patched", "127.0.0.9:8998": "patched", "10.0.0.1:8998": "stock"}
    for address in kinds:
        manager.note_prefill(address)
    counts = manager.count_prefills({**kinds, "10.0.0.9:8998": "stock"})
    assert counts == {"patched": 1, "stock": 2, "refused": 0, "silent": 0}
    manager.note_requested(ROOM, "localhost:8998")
    manager.note_requested(ROOM, "never-answered:8998")
    manager.note_verified("10.0.0.1:8998", False)
    assert noted(log) == [
        ("requested", ROOM, "127.0.0.1:8998"),
        ("requested", ROOM, ""),
        ("verified", "10.0.0.1:8998", False),
    ]


def test_nothing_is_resolved_without_metrics(monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", None)
    manager = NotedTransfers()
    manager.note_prefill("localhost:8998")
    assert not manager.prefill_names


# Decode's queues


def request(room: int, message: str = "") -> SimpleNamespace:
    ended = SimpleNamespace(message=message) if message else None
    times = SimpleNamespace(forward_entry_time=0.0)
    return SimpleNamespace(bootstrap_room=room, finished_reason=ended, time_stats=times)


def test_request_that_waits_no_longer_was_scheduled_or_aborted(log):
    manager, queued = SimpleNamespace(transfer_log=log), QueuedRequests()
    served, left, late, waits = (request(room) for room in (1, 2, 3, 4))
    queued.note(manager, [], [], [served, left, late, waits], [])
    assert not noted(log)
    served.time_stats.forward_entry_time = time.perf_counter() - 5.0
    late.finished_reason = SimpleNamespace(message="Request waiting timeout reached")
    queued.note(manager, [], [], [], [waits])
    assert sorted(noted(log)) == [
        ("dropped", 2, noted_requests.ABORTED),
        ("dropped", 3, "Request waiting timeout reached"),
        ("ended", 1),
    ]
    (ended,) = [at for happened, at, _ in log._events if happened.__name__ == "ended"]
    assert 5.0 <= time.monotonic() - ended < 10.0  # when it was scheduled, not when it was noted


def test_request_that_the_engine_drops_when_its_kv_has_arrived_has_failed(log):
    """Such as one whose metadata is another request's."""
    manager, queued = SimpleNamespace(transfer_log=log), QueuedRequests()
    entries = [
        SimpleNamespace(req=request(1)),
        SimpleNamespace(req=request(2, "Metadata corruption detected")),
        SimpleNamespace(req=request(3)),
    ]
    queued.note(manager, entries, entries[2:], [entries[0].req], [])
    assert noted(log) == [("dropped", 2, "Metadata corruption detected")]


def test_health_checks_are_not_noted(log):
    manager = SimpleNamespace(transfer_log=log, prefill_names={}, request_status={})
    req = SimpleNamespace(bootstrap_room=ROOM, rid="rid", origin_input_ids=[1, 2])
    for host in (noted_requests.FAKE_BOOTSTRAP_HOST, "10.0.0.1"):
        req.bootstrap_host = host
        noted_requests.note_request(manager, req, f"{host}:8998")
    assert noted(log) == [("opened", ROOM, "rid", "", 2)]


# Transfer engines


@pytest.fixture
def sending():
    made = Sending()
    made.set(RANK, ROOM, "kv")
    return made


@pytest.mark.parametrize("status", [0, -1])
def test_writes_of_a_synchronous_engine_count_even_if_they_fail(log, sending, status):
    engine = SimpleNamespace(batch_transfer_sync=lambda *given: status)
    metered = MeteredEngine(engine, log, sending, lambda rank: SERVER)
    assert metered.batch_transfer_sync(RANK, [1, 2], [3, 4], [10, 20]) == status
    assert noted(log, "entered") == [("entered", ROOM, "sending")]  # before the write, which hangs
    ((_, *facts, seconds),) = noted(log, "sent")
    assert tuple(facts) == SENT and (seconds is None) == (status != 0)


def test_error_of_a_meter_fails_no_transfer(log, sending):
    engine = SimpleNamespace(batch_transfer_sync=lambda *given: 0)
    metered = MeteredEngine(engine, log, sending, None)  # nobody knows a rank's server
    assert metered.batch_transfer_sync(RANK, [1], [2], [10]) == 0
    assert not noted(log, "sent")


class FakeAgent:
    """Replaces NIXL's agent, whose only transfer has a state."""

    def __init__(self):
        self.handle, self.state = object(), "PROC"

    def get_xfer_descs(self, descs, *more):
        return descs

    def initialize_xfer(self, *given):
        return self.handle

    def transfer(self, handle) -> str:
        return self.state

    check_xfer_state = transfer

    def release_xfer_handle(self, handle) -> None:
        pass


@pytest.fixture
def agent(log, sending):
    return MeteredAgent(FakeAgent(), log, sending, lambda rank: SERVER)


def start(agent: MeteredAgent, operation: str = "WRITE"):
    """Starts a transfer of two blocks; returns its handle."""
    agent._engine.state = "PROC"
    sides = [agent.get_xfer_descs(BLOCKS) for _ in range(2)]
    handle = agent.initialize_xfer(operation, *sides, RANK)
    assert agent.transfer(handle) == "PROC"
    return handle


@pytest.mark.parametrize("state", ["DONE", "ERR", "released"])
def test_nixl_transfer_counts_once_when_it_ends(log, agent, state):
    handle = start(agent)
    assert agent.check_xfer_state(handle) == "PROC" and not noted(log, "sent")
    if state == "released":
        agent.release_xfer_handle(handle)
    else:
        agent._engine.state = state
        agent.check_xfer_state(handle)
        agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
    ((_, *facts, seconds),) = noted(log, "sent")
    assert tuple(facts) == SENT and (seconds is None) == (state != "DONE")


def test_nixl_handle_with_the_number_of_an_earlier_one_is_another(log, agent):
    """Such as that of a probe after a transfer that was never looked at again."""
    start(agent)
    handle = start(agent, "READ")
    agent._engine.state = "DONE"
    agent.check_xfer_state(handle)
    assert not noted(log, "sent")


def test_what_is_sent_is_remembered_for_a_bounded_number_of_ranks(monkeypatch):
    monkeypatch.setattr(transfer_meter, "MAX_RANKS", 2)
    sending, seen = Sending(), {}
    for number, rank in enumerate("abc"):
        sending.set(rank, number, "aux")

    def look() -> None:
        """A helper of the thread that sends."""
        seen.update((rank, sending.payload(rank).room) for rank in "abc")

    helper = threading.Thread(target=look)
    helper.start()
    helper.join()
    assert seen == {"a": -1, "b": 1, "c": 2}
