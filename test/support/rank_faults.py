"""Faults inside a rank process: transfers that fail, that come late, and deaths in the middle."""

import contextlib
import inspect
import os
import signal
import socket
import threading
import time

from pd_harness.polling import wait_until

INJECTED_ERROR = "the test makes this transfer fail"
EXIT_SECONDS = 10


class TransferFaults:
    """Befalls chosen transfers of one rank, each of which is one call to the transfer engine.

    In this order a request makes one for the KV of every chunk, one for its state if it has any,
    and one for its metadata; if several decode ranks ask for it, all of that for each of them.

    How a transfer fails: `status`, the engine's call returns an error; `exception`, it raises;
    `late status` and `late exception`, NIXL alone, it says that it has begun, and then so. Or
    `wait`: it begins after some seconds. Or `down`: Mooncake and Ascend, for some seconds from now
    all fail. Or `cut`: all connections of this process break before it begins. Or processes die:
    with `kill` before it begins, with `freeze` they stand still when it begins, and die after some
    seconds.
    """

    # When the last transfer that waited began, on the monotonic clock, which all ranks share.
    began_at = 0.0

    def __init__(self, manager):
        self.plan()
        self._manager = manager
        self._late = []
        self._sends_state = False
        if hasattr(manager, "agent"):
            self._is_done = manager.agent.check_xfer_state
            self._transfer = manager.agent.transfer
            manager.agent.transfer = self._start_nixl
            manager.agent.check_xfer_state = self._check_nixl
        else:
            self._transfer = manager.engine.batch_transfer_sync
            manager.engine.batch_transfer_sync = self._run_mooncake
        self._send_state = manager.maybe_send_extra
        manager.maybe_send_extra = self._track_state

    def plan(self, how="", at=(), only_state=False, pids=(), seconds=0.0) -> None:
        """From now on, `at` these transfers (the next one is 1); with `only_state`, of state's."""
        self._how, self._at, self._only_state = how, tuple(at), only_state
        self._pids, self._seconds = tuple(pids), seconds
        self._up_again = time.monotonic() + seconds
        self._calls = 0

    def _inject(self) -> str:
        """What is to become of the transfer that begins now."""
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
            # A message that is under way then is lost, in every engine, and its reader waits.
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
        """Where this rank and the decode ranks that it knows read messages."""
        peers = self._manager.decode_kv_args_table.values()
        return {self._manager.rank_port, *(peer.dst_port for peer in peers)}

    def _track_state(self, *args, **kwargs):
        with self._sending_state():
            sent = self._send_state(*args, **kwargs)
        return self._each_tracked(sent) if inspect.isgenerator(sent) else sent

    def _each_tracked(self, transfers):
        """Later releases begin one after the other, as they are asked for."""
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
            return self._transfer(handle, *args)  # no request's
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


def fail_next_registration(manager, what: str) -> None:
    """The next time a decode rank registers, prefill cannot `plan` for it, or `connect` to it."""
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
    """Counts the calls to NIXL that begin while another thread of this process is inside one."""

    NAMES = (
        *("add_remote_agent", "remove_remote_agent", "send_notif", "get_new_notifs"),
        *("initialize_xfer", "transfer", "check_xfer_state", "release_xfer_handle"),
    )

    def __init__(self, nixl):
        """Of NIXL's module. That a handle is dropped is a call, too."""
        self.count, self.at_once = 0, 0
        self._inside, self._lock = [], threading.RLock()  # a handle is dropped at any time
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
    """Break those of this process, as a network may; both sides live on. Returns how many.

    Those from or to the ports in ``spare`` stay.
    """
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket
        with sock, contextlib.suppress(OSError):  # not connected
            if sock.family != socket.AF_INET:
                continue
            if spare.isdisjoint((sock.getpeername()[1], sock.getsockname()[1])):
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def kill(pid: int) -> None:
    """At once, and wait until it is gone."""

    def killed() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return False
        return True

    wait_until(killed, EXIT_SECONDS)
