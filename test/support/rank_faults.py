"""Faults inside a rank process: failing and delayed transfers, and processes killed in between."""

import contextlib
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from pd_harness.polling import wait_until

INJECTED_ERROR = "the test makes this transfer fail"
EXIT_SECONDS = 10


class TransferFaults:
    """Injects faults into chosen transfers of one rank; a transfer is one transfer-engine call.

    A request makes one transfer per chunk for KV, then one for its state if it has any, and then
    one for its metadata. It makes all of them for each decode rank.

    How a transfer fails:

        status            the transfer engine's call returns an error
        exception         the call raises
        late status       NIXL only: the call succeeds, and a later check returns an error
        late exception    NIXL only: the call succeeds, and a later check raises
        wait              the transfer starts after `seconds`
        down              Mooncake and Ascend only: all transfers fail for `seconds` from now
        cut               all connections of this process break before the transfer starts
        kill              the processes `pids` are killed before it starts
        freeze            `pids` are stopped when it starts, and killed after `seconds`
    """

    # When the last delayed transfer started, on the monotonic clock, which all ranks share.
    began_at = 0.0

    def __init__(self, manager):
        self.plan()
        self._manager = manager
        self._late = []
        self._sends_state = False
        if hasattr(manager, "agent"):
            agent = nixl_agent(manager)
            self._is_done, self._transfer = agent.check_xfer_state, agent.transfer
            agent.transfer, agent.check_xfer_state = self._start_nixl, self._check_nixl
        else:
            self._transfer = manager.engine.batch_transfer_sync
            manager.engine.batch_transfer_sync = self._run_mooncake
        self._send_state = manager.maybe_send_extra
        manager.maybe_send_extra = self._track_state

    def plan(self, how="", at=(), only_state=False, pids=(), seconds=0.0) -> None:
        """Plans faults in the transfers `at`, of which the next is 1; replaces earlier plans.

        With `only_state`, only transfers of state count.
        """
        self._how, self._at, self._only_state = how, tuple(at), only_state
        self._pids, self._seconds = tuple(pids), seconds
        self._up_again = time.monotonic() + seconds
        self._calls = 0

    def _inject(self) -> str:
        """Injects the fault of the transfer that starts now, if any; returns its name."""
        if self._only_state and not self._sends_state:
            return ""
        if self._how == "down":
            return "status" if time.monotonic() < self._up_again else ""
        self._calls += 1
        if self._calls not in self._at:
            return ""
        if self._how == "exception":
            raise RuntimeError(INJECTED_ERROR)
        if self._how == "wait":
            time.sleep(self._seconds)
            self.began_at = time.monotonic()
        if self._how == "cut":
            # Every engine would lose a message in flight, and its reader would wait for it.
            cut_connections(spare=self._message_ports())
        if self._how == "kill":
            for pid in self._pids:
                kill(pid)
        if self._how == "freeze":
            for pid in self._pids:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(self._seconds, kill, [pid]).start()
        return self._how

    def _message_ports(self) -> set[int]:
        """Returns the ports on which this rank and its decode ranks read messages."""
        peers = self._manager.decode_kv_args_table.values()
        return {self._manager.rank_port, *(peer.dst_port for peer in peers)}

    def _track_state(self, *args, **kwargs):
        with self._sending_state():
            sent = self._send_state(*args, **kwargs)
        return self._each_tracked(sent) if inspect.isgenerator(sent) else sent

    def _each_tracked(self, transfers):
        """Tracks state transfers from a generator, which starts each one when it is consumed."""
        while True:
            with self._sending_state():
                handle = next(transfers, None)
            if handle is None:
                return
            yield handle

    @contextlib.contextmanager
    def _sending_state(self):
        self._sends_state = True
        try:
            yield
        finally:
            self._sends_state = False

    def _run_mooncake(self, *args) -> int:
        return -1 if self._inject() == "status" else self._transfer(*args)

    def _start_nixl(self, handle, *args) -> str:
        if threading.current_thread().name == "nixl-connect":
            return self._transfer(handle, *args)  # an early connection, not a request
        how = self._inject()
        if how == "status":
            return "ERR"
        if how.startswith("late"):
            self._late.append((handle, how))
            return "PROC"
        return self._transfer(handle, *args)

    def _check_nixl(self, handle) -> str:
        how = next((how for other, how in self._late if other is handle), "")
        if how == "late exception":
            raise RuntimeError(INJECTED_ERROR)
        return "ERR" if how else self._is_done(handle)


def nixl_agent(manager):
    """Returns the manager's NIXL agent, which the patch set wraps for 0.5.18."""
    agent = manager.agent
    return agent.agent if hasattr(agent, "manager") else agent


def fail_next_registration(manager, what: str) -> None:
    """Makes prefill fail once, at the next registration, to `plan` for or `connect` to the rank."""
    from sglang.srt.disaggregation.pd import peer_plans  # stock has none

    owner, name = {
        "plan": (peer_plans, "plan_for_peer"),
        "connect": (getattr(manager, "agent", None), "add_remote_agent"),
    }[what]
    right = getattr(owner, name)

    def fail(*args):
        setattr(owner, name, right)
        raise RuntimeError(INJECTED_ERROR)

    setattr(owner, name, fail)


class AgentCalls:
    """Counts calls to NIXL, and those that start while another thread is inside one.

    Attributes:
        count: All calls.
        at_once: Calls that overlapped with another thread's.
    """

    NAMES = (
        *("add_remote_agent", "remove_remote_agent", "send_notif", "get_new_notifs"),
        *("initialize_xfer", "transfer", "check_xfer_state", "release_xfer_handle"),
    )

    def __init__(self, manager):
        """Wraps NIXL's calls, of all managers; a handle's destructor counts as a call."""
        nixl = sys.modules["nixl._api"]
        self.count, self.at_once = 0, 0
        self._inside, self._lock = [], threading.RLock()  # destructors may run at any time
        for name in self.NAMES:
            setattr(nixl.nixl_agent, name, self._counted(getattr(nixl.nixl_agent, name)))
        nixl.nixl_xfer_handle.__del__ = self._counted(nixl.nixl_xfer_handle.__del__)

    def _counted(self, call):
        def counted(*args, **options):
            me = threading.get_ident()
            with self._lock:
                self.count += 1
                self.at_once += any(other != me for other in self._inside)
                self._inside.append(me)
            try:
                return call(*args, **options)
            finally:
                with self._lock:
                    self._inside.remove(me)

        return counted


def cut_connections(spare: frozenset[int] | set[int] = frozenset()) -> int:
    """Breaks this process's connections, as a network may, and returns how many it broke.

    Both ends stay alive. Connections from or to the ports in ``spare`` stay open.
    """
    cut = 0
    for sock in own_sockets(socket.AF_INET):
        with contextlib.suppress(OSError):  # not connected
            if spare.isdisjoint((sock.getpeername()[1], sock.getsockname()[1])):
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def own_sockets(*families: int) -> Iterator[socket.socket]:
    """Yields duplicates of this process's sockets, each of which is open until the next one."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with sock:
            if sock.family in families:
                yield sock


def kill(pid: int) -> None:
    """Kills a process and waits until it has exited."""

    def killed() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return False
        return True

    wait_until(killed, EXIT_SECONDS)
