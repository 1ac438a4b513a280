"""NIXL: prefill connects to a decode rank once it registers, without delaying other ranks."""

import threading
import time

import pytest
from sglang.srt.disaggregation.pd import early_connections
from sglang.srt.disaggregation.pd.early_connections import EarlyConnections

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

THREADS = 4
AUX = [1 << 20, 1 << 21]


class FakeNixlAgent:
    """Replaces NIXL's agent: records calling threads, and returns a peer's `states` in turn."""

    def __init__(self):
        self.started, self.states, self.threads, self.registered = {}, {}, set(), []
        self.reads, self.removed = [], set()

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return {"num_threads": str(THREADS)}

    def register_memory(self, memory_regions, memory: str):
        self.registered += [(*region[:2], memory) for region in memory_regions]

    def get_xfer_descs(self, rows, memory: str):
        return rows.tolist(), memory

    def initialize_xfer(self, operation: str, ours, theirs, peer: str):
        self.threads.add(threading.get_ident())
        if "unknown" in self.states.get(peer, ()):
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.started[peer] = operation, ours, theirs
        return peer

    def transfer(self, peer: str) -> str:
        if peer in self.removed:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        self.reads.append(peer)
        return "PROC"

    def check_xfer_state(self, peer: str) -> str:
        states = self.states.get(peer, ["DONE"])
        state = states.pop(0) if len(states) > 1 else states[0]
        if state == "raises":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return state


class Manager(EarlyConnections):
    def __init__(self):
        self.agent, self.failed = FakeNixlAgent(), []

    def handle_connect_failure(self, peer: str) -> None:
        self.failed.append(peer)


@pytest.fixture
def manager(monkeypatch) -> Manager:
    manager = Manager()
    monkeypatch.setattr(early_connections, "PAUSE_SECONDS", 0.01)
    return manager


def is_logged(caplog, text: str) -> bool:
    return wait_until(lambda: text in caplog.text, 10)


def test_each_nixl_thread_reads_one_byte_of_metadata(manager, caplog):
    caplog.set_level("INFO")
    manager.connect_early("decode", AUX)
    assert is_logged(caplog, "Connected to decode decode in ")
    operation, (ours, own_memory), (theirs, memory) = manager.agent.started["decode"]
    assert (operation, own_memory, memory) == ("READ", "DRAM", "DRAM")
    # NIXL splits a transfer into parts of at least 1,024 copies, one for each thread.
    assert theirs == [[AUX[0], 1, 0]] * THREADS * 1024
    ((byte, length, kind),) = manager.agent.registered
    assert ours == [[byte, 1, 0]] * len(theirs) and (length, kind) == (1, "DRAM")
    assert threading.get_ident() not in manager.agent.threads


def test_each_rank_is_read_several_times(manager):
    """Over TCP, NIXL's progress thread spins until UCX's last round trip."""
    for peer in ("decode", "other"):
        manager.connect_early(peer, AUX)
    reads = 1 + early_connections.MORE_READS
    assert wait_until(lambda: len(manager.agent.reads) == 2 * reads, 10)
    assert wait_until(lambda: not manager.connecting, 10)
    assert manager.agent.reads.count("decode") == reads > 1


@pytest.mark.parametrize("how", ["raises", "ERR"])
def test_failure_of_a_later_read_is_left_to_the_first_request(manager, caplog, how):
    caplog.set_level("INFO")
    manager.agent.states["lost"] = ["PROC", "DONE", how]
    manager.connect_early("lost", AUX)
    assert is_logged(caplog, "Connected to decode lost in ")
    assert wait_until(lambda: not manager.connecting, 10)
    assert manager.agent.reads == ["lost", "lost"] and not manager.failed
    assert "could not connect" not in caplog.text


def test_rank_that_nixl_drops_between_two_reads_is_left_alone(manager, caplog, monkeypatch):
    """NIXL does not start a transfer whose agent it no longer knows; releases 0.9 to 1.5 raise."""
    caplog.set_level("INFO")
    monkeypatch.setattr(early_connections, "PAUSE_SECONDS", 0.5)
    manager.connect_early("lost", AUX)
    assert is_logged(caplog, "Connected to decode lost in ")
    manager.agent.removed.add("lost")
    assert list(manager.connecting) == ["lost"]
    assert wait_until(lambda: not manager.connecting, 10)
    manager.connect_early("other", AUX)  # by the same thread
    assert is_logged(caplog, "Connected to decode other in ")
    assert manager.agent.reads.count("lost") == 1 and not manager.failed


def test_connection_can_be_ended_between_two_reads(manager, monkeypatch):
    """So that a lost one can be replaced at once."""
    monkeypatch.setattr(early_connections, "PAUSE_SECONDS", 0.3)
    manager.connect_early("lost", AUX)
    assert wait_until(lambda: manager.connecting and manager.connecting["lost"].reads == 1, 10)
    connection = manager.connecting["lost"]
    assert manager.end_early_connection("lost")
    assert connection.handle is None and not manager.connecting
    time.sleep(0.5)
    assert manager.agent.reads == ["lost"]
    assert manager.end_early_connection("lost")


def test_connection_ends_after_the_read_during_which_it_was_to_end(manager):
    manager.agent.states["lost"] = ["PROC"]
    manager.connect_early("lost", AUX)
    assert wait_until(lambda: manager.agent.reads, 10)
    assert not manager.end_early_connection("lost")
    manager.agent.states["lost"] = ["DONE"]
    assert wait_until(lambda: not manager.connecting, 10)
    assert manager.agent.reads == ["lost"] and not manager.failed


def test_later_read_that_does_not_end_is_given_up(manager, monkeypatch):
    """The rank may be cut off; its connection can be replaced only without a read."""
    monkeypatch.setattr(early_connections, "MORE_READS_SECONDS", 0.5)
    manager.agent.states["lost"] = ["DONE", "PROC"]
    manager.connect_early("lost", AUX)
    assert wait_until(lambda: len(manager.agent.reads) == 2, 10)
    assert not manager.end_early_connection("lost")
    assert wait_until(lambda: not manager.connecting, 10)
    assert not manager.failed


def test_silent_rank_does_not_delay_connections_to_others(manager, caplog, monkeypatch):
    """One thread makes all connections."""
    caplog.set_level("INFO")
    manager.agent.states["silent"] = ["PROC"]
    before = threading.active_count()
    started_at = time.monotonic()
    for peer in ("silent", *map(str, range(20))):
        manager.connect_early(peer, AUX)
    assert time.monotonic() - started_at < 0.5
    assert is_logged(caplog, "Connected to decode 19 in ") and "silent" not in caplog.text
    assert len(manager.agent.threads) == 1 and threading.active_count() <= before + 1
    monkeypatch.setattr(early_connections, "CONNECT_SECONDS", 0.0)
    assert is_logged(caplog, "Decode silent has not answered NIXL for ")
    assert not manager.failed


@pytest.mark.parametrize("how", ["unknown", "raises", "ERR"])
def test_failed_early_connection_is_left_to_the_first_request(manager, caplog, how):
    caplog.set_level("INFO")
    manager.agent.states["lost"] = ["PROC", how]
    for peer in ("lost", "other"):
        manager.connect_early(peer, AUX)
    assert is_logged(caplog, "NIXL could not connect to decode lost; a request will try again: ")
    assert is_logged(caplog, "Connected to decode other in ")
    assert wait_until(lambda: not manager.connecting, 10) and manager.failed == ["lost"]


def test_agent_lock_is_free_while_a_connection_is_pending(manager):
    manager.agent_lock = threading.Lock()
    manager.agent.states["silent"] = ["PROC"]
    manager.connect_early("silent", AUX)
    assert wait_until(lambda: "silent" in manager.agent.started, 10)
    assert wait_until(lambda: list(manager.connecting) == ["silent"], 10)
    for _ in range(20):
        assert manager.agent_lock.acquire(timeout=1)
        manager.agent_lock.release()
    manager.agent.states["silent"] = ["DONE"]
    assert wait_until(lambda: not manager.connecting, 10)


@pytest.mark.parametrize("aux, backend", [([], "UCX"), (AUX, "LIBFABRIC")])
def test_no_early_connection_without_aux_or_ucx(manager, monkeypatch, aux, backend):
    """The rank has no metadata in host memory, or NIXL's backend is not UCX."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_NIXL_BACKEND", backend)
    manager.connect_early("decode", aux)
    assert not manager.connects and manager.to_connect.empty()


def test_memory_registration_failure_disables_early_connections(manager, caplog):
    def refuse(memory_regions, memory):
        raise RuntimeError("NIXL_ERR_BACKEND")

    manager.agent.register_memory = refuse
    manager.connect_early("decode", AUX)
    assert is_logged(
        caplog, "Decode ranks are connected only at their first requests: NIXL_ERR_BACKEND"
    )
    assert not manager.agent.started
    assert wait_until(lambda: not manager.connects, 10)  # the next registration tries again


@pytest.mark.parametrize("value, connects", [("0", False), ("", True)])
def test_early_connections_can_be_disabled(manager, monkeypatch, value, connects):
    monkeypatch.setenv(early_connections.VARIABLE, value)
    manager.connect_early("decode", AUX)
    assert manager.connects == connects
