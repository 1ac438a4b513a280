"""Sockets to other ranks: any thread sends without waiting, and can check if a peer still answers.

send_multipart        one socket per endpoint, which connects and reconnects by itself
heartbeats            ZeroMQ pings each peer; one that does not answer has lost its connection
silent_for            seconds since there was a connection
is_listening          whether a process accepts connections at the endpoint
call_periodically     calls methods that check peers, every half second
ConnectionSnapshot    which prefill ranks are lost or silent, as decode sees it
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Dict, List, Optional, Tuple
from weakref import WeakMethod

import zmq

logger = logging.getLogger(__name__)

# 0.5.9 leaves ZeroMQ's limit, 1,023; 0.5.23 sets 16,384. A large fleet has more ranks, and each
# socket has a monitor.
MAX_SOCKETS = 65536
# Messages that may wait for one peer; further ones are rejected.
MAX_QUEUED_MESSAGES = 65536
LINGER_MS = 5000
# How often a peer is pinged and how soon it must answer, to detect that it hangs or is cut off.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 4000
# Time limit of an attempt to connect; the system's is minutes if packets are lost.
CONNECT_MS = 3000
RECONNECT_MS = (100, 2000)
# Sockets of peers that are gone this long are closed, and opened again when needed.
CLOSE_AFTER_SECONDS = 60.0
# Peers with closed sockets for which it is kept when they were lost.
MAX_CLOSED_PEERS = 4096
POLL_INTERVAL_SECONDS = 0.5
# A sleep between polls that takes longer means that this process was suspended: whether its peers
# were silent is unknown.
SUSPENDED_SECONDS = 3.0
# A connection that has been lost this long will not come back at once by itself.
LOST_SECONDS = 1.0
# Time limit of `is_listening`, for which 0.5.9's scheduler and 0.5.23's transfer workers wait: many
# round trips within a data center.
LISTENING_SECONDS = 0.03


class _OpenSocket:
    """One endpoint's socket, the state of its connection, and when it was last used.

    Attributes:
        lost_at: When the connection was lost, on the monotonic clock; None while connected.
        was_connected: Whether there ever was a connection.
    """

    was_connected = False

    def __init__(self, context: zmq.Context, endpoint: str, is_ipv6: bool):
        self.used = self.lost_at = time.monotonic()
        # Held while sending, so that messages to one peer do not wait for those to another.
        self.sending = threading.Lock()
        self.sock = context.socket(zmq.PUSH)
        options = {
            zmq.IPV6: int(is_ipv6),
            zmq.SNDHWM: MAX_QUEUED_MESSAGES,
            zmq.LINGER: LINGER_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.CONNECT_TIMEOUT: CONNECT_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS[1],
        }
        for option, value in options.items():
            self.sock.setsockopt(option, value)
        self.monitor = self.sock.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.sock.connect(endpoint)

    def read_events(self) -> None:
        while self.monitor.poll(0):
            event, _ = self.monitor.recv_multipart()
            if int.from_bytes(event[:2], "little") == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.lost_at, self.was_connected = None, True
            elif self.lost_at is None:
                self.lost_at = time.monotonic()

    def is_gone(self) -> bool:
        now, lost_at = time.monotonic(), self.lost_at
        return lost_at is not None and now - max(lost_at, self.used) > CLOSE_AFTER_SECONDS

    def close(self, linger: Optional[int] = None) -> None:
        with self.sending:
            self.sock.disable_monitor()
            self.monitor.close(linger=0)
            self.sock.close(linger)


class _SocketPool:
    """This process's sockets, by endpoint, and the thread that monitors them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.open: Dict[str, _OpenSocket] = {}
        # When peers whose sockets are closed lost their connection.
        self.closed: OrderedDict[str, float] = OrderedDict()
        self.callbacks: List[WeakMethod] = []
        self.context: Optional[zmq.Context] = None
        self.process = 0

    def get_or_open(self, endpoint: str, is_ipv6: bool) -> _OpenSocket:
        """Returns the endpoint's socket, opened if needed; the caller holds `lock`."""
        self.start()
        known = self.open.get(endpoint)
        if known is None:
            known = self.open[endpoint] = _OpenSocket(self.context, endpoint, is_ipv6)
            self.closed.pop(endpoint, None)
        return known

    def find(self, endpoint: str) -> Optional[_OpenSocket]:
        """Returns the endpoint's socket, if it is open in this process."""
        return self.open.get(endpoint) if self.process == os.getpid() else None

    def start(self) -> None:
        """Starts once per process: a fork must not use the sockets that it inherits."""
        if self.process == os.getpid():
            return
        self.open, self.callbacks = {}, []
        self.closed.clear()
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        try:
            threading.Thread(target=self._monitor, name="PeerSockets", daemon=True).start()
        except RuntimeError as error:  # out of threads; callers expect errors of sockets
            raise zmq.ZMQError(errno.EAGAIN, str(error)) from error
        self.process = os.getpid()  # last: if no thread can start, the next call tries again

    def _read_events(self) -> None:
        """Reads the events of all sockets; most have none, and hundreds may be open."""
        known = {one.monitor: one for one in self.open.values()}
        for monitor, _ in zmq.zmq_poll([(monitor, zmq.POLLIN) for monitor in known], 0):
            known[monitor].read_events()

    def _check_sockets(self, was_suspended: bool) -> None:
        """Notes lost connections, and closes sockets whose peers are gone."""
        self._read_events()
        now = time.monotonic()
        for endpoint, known in list(self.open.items()):
            if was_suspended and known.lost_at is not None:
                known.lost_at = now  # no connection was possible meanwhile
            if known.is_gone():
                del self.open[endpoint]
                self.closed[endpoint] = known.lost_at
                known.close(linger=0)
        while len(self.closed) > MAX_CLOSED_PEERS:
            self.closed.popitem(last=False)

    def _monitor(self) -> None:
        while not self.context.closed:
            before = time.monotonic()
            time.sleep(POLL_INTERVAL_SECONDS)
            with self.lock:
                was_suspended = time.monotonic() - before > SUSPENDED_SECONDS
                try:
                    self._check_sockets(was_suspended)
                except Exception:  # without this thread, no peer would ever count as silent
                    logger.exception("Could not check the connections to peers")
                self.callbacks = [known for known in self.callbacks if known() is not None]
                callbacks = [known() for known in self.callbacks]
            for callback in callbacks:
                try:
                    if callback is not None:
                        callback()
                except Exception:
                    logger.exception("A periodic check of peers failed")
            callback = callbacks = None  # otherwise this thread would keep their owners alive


_sockets = _SocketPool()


class PeerSocket:
    """Sends to one endpoint from any thread, and never waits."""

    def __init__(self, endpoint: str, is_ipv6: bool = False):
        self.endpoint, self.is_ipv6 = endpoint, is_ipv6

    @classmethod
    def to(cls, host: str, port: int) -> PeerSocket:
        """Returns the socket to a port of a host, given by IP address or name."""
        host = host.strip("[]")
        is_ipv6 = ":" in host
        return cls(f"tcp://[{host}]:{port}" if is_ipv6 else f"tcp://{host}:{port}", is_ipv6)

    def open(self) -> None:
        """Connects, unless the socket is open; the peer's silence is measured from then on."""
        with _sockets.lock:
            _sockets.get_or_open(self.endpoint, self.is_ipv6)

    def send_multipart(self, frames: List[bytes]) -> None:
        """Queues a message, even before the peer is connected or reconnected.

        Raises:
            zmq.Again: The peer accepts none, and `MAX_QUEUED_MESSAGES` already wait for it.
        """
        with _sockets.lock:
            known = _sockets.get_or_open(self.endpoint, self.is_ipv6)
            known.used = time.monotonic()  # stays open for `CLOSE_AFTER_SECONDS`
        with known.sending:
            known.sock.send_multipart(frames, zmq.NOBLOCK)

    def silent_for(self) -> float:
        """Returns the seconds without a connection; 0 while connected.

        A connection is lost when the peer exits, and `HEARTBEAT_TIMEOUT_MS` after the peer hangs or
        its packets are lost; `POLL_INTERVAL_SECONDS` may pass before that is noticed. Infinite if
        the socket was never opened, or closed before the last `MAX_CLOSED_PEERS` ones.
        """
        known = _sockets.find(self.endpoint)
        if known is not None and known.lost_at is None:  # no lock: called for each message
            return 0.0
        with _sockets.lock:
            known = _sockets.find(self.endpoint)
            if known is None:
                lost_at = _sockets.closed.get(self.endpoint, -math.inf)
            else:
                if known.lost_at is not None:  # the thread notices a loss soon enough
                    known.read_events()
                lost_at = known.lost_at
            return 0.0 if lost_at is None else time.monotonic() - lost_at

    def lost_for(self) -> float:
        """Returns `silent_for`, but 0 while the first connection is being made."""
        with _sockets.lock:
            known = _sockets.find(self.endpoint)
            if known is not None:
                known.read_events()
                if not known.was_connected:
                    return 0.0
        return self.silent_for()

    def is_listening(self) -> bool:
        """Returns whether a process accepts connections there.

        Waits `LISTENING_SECONDS` at most for each address, and until a host name is resolved.
        Unlike `silent_for`, it needs no other thread to notice that a process is gone. A process
        that is stopped accepts them.
        """
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), LISTENING_SECONDS):
                return True
        except (OSError, OverflowError, UnicodeError):  # the others for an invalid port or name
            return False

    def note_alive(self) -> None:
        """Restarts the peer's silence, because the peer has answered in another way."""
        with _sockets.lock:
            known = _sockets.find(self.endpoint)
            if known is not None and known.lost_at is not None:
                known.lost_at = time.monotonic()


class ConnectionSnapshot:
    """The state of connections to prefill ranks, given by `rank_ip` and `rank_port`, at one time.

    Checks each socket once, because hundreds of rooms may wait for the same ranks.
    """

    def __init__(self, silent_seconds: float):
        self.silent_seconds = silent_seconds
        self._seconds = functools.cache(_seconds_disconnected)

    def is_silent(self, rank: dict) -> bool:
        """Whether requests that wait for this rank must fail."""
        return self._seconds(rank["rank_ip"], rank["rank_port"])[0] >= self.silent_seconds

    def is_lost(self, rank: dict) -> bool:
        """Whether this rank may have restarted, so that its server must be queried again."""
        lost_for = self._seconds(rank["rank_ip"], rank["rank_port"])[1]
        return lost_for >= LOST_SECONDS or self.is_silent(rank)


def _seconds_disconnected(host: str, port: int) -> Tuple[float, float]:
    """Returns `silent_for` and `lost_for` of the socket to a rank."""
    socket = PeerSocket.to(host, port)
    return socket.silent_for(), socket.lost_for()


def call_periodically(callback: Callable[[], None]) -> None:
    """Calls a method every half second while its object lives.

    While the method runs, no lost connection is noticed.
    """
    with _sockets.lock:
        _sockets.start()
        if callback not in [known() for known in _sockets.callbacks]:
            _sockets.callbacks.append(WeakMethod(callback))


def open_sockets() -> List[str]:
    """Returns the endpoints of this process's open sockets."""
    with _sockets.lock:
        return list(_sockets.open) if _sockets.process == os.getpid() else []
