"""Sockets to other ranks: any thread sends, none waits, and it is known which peer still answers.

send_multipart    one socket an endpoint; it connects, and connects again, by itself
heartbeats        ZeroMQ asks each peer; one that does not answer has lost its connection
silent_for        seconds since there was a connection
call_periodically        calls who wants to know, again and again
ConnectionSnapshot          which prefill ranks are lost or silent, as decode sees it
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Dict, List, Optional, Tuple
from weakref import WeakMethod

import zmq

logger = logging.getLogger(__name__)

# The engine's own limit is ZeroMQ's: 1,023, and a large fleet has more ranks.
MAX_SOCKETS = 65536
# Messages that wait for one peer; more are refused.
MAX_QUEUED_MESSAGES = 65536
LINGER_MS = 5000
# A peer that is stopped, or whose packets vanish, is asked each so often and answers within.
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 4000
# An attempt to connect ends after that; else packets that vanish cost the system's minutes.
CONNECT_MS = 3000
RECONNECT_MS = (100, 2000)
# Sockets of peers that are gone are closed after that, and opened again when needed.
CLOSE_AFTER_SECONDS = 60.0
# Of so many it is remembered when they went.
MAX_CLOSED_PEERS = 4096
POLL_INTERVAL_SECONDS = 0.5
# This process was stopped itself: how long its peers were silent, it does not know.
SUSPENDED_SECONDS = 3.0
# A connection that was lost for so long does not come back by itself at once.
LOST_SECONDS = 1.0


class _OpenSocket:
    """One endpoint's socket, what ZeroMQ tells of its connection, and when it was used last.

    `lost_at`: since when there has been no connection, on the monotonic clock; None while there is.
    `was_connected`: whether there was one.
    """

    was_connected = False

    def __init__(self, context: zmq.Context, endpoint: str, is_ipv6: bool):
        self.used = self.lost_at = time.monotonic()
        # Held while sending, so that one peer's messages wait for no other's.
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
    """Of this process, by endpoint, and the thread that looks after them."""

    def __init__(self):
        self.lock = threading.Lock()
        self.open: Dict[str, _OpenSocket] = {}
        # Since when those had no connection whose sockets are closed.
        self.closed: OrderedDict[str, float] = OrderedDict()
        self.callbacks: List[WeakMethod] = []
        self.context: Optional[zmq.Context] = None
        self.process = 0

    def get_or_open(self, endpoint: str, is_ipv6: bool) -> _OpenSocket:
        """Its socket, made if there is none; the lock is held."""
        self.start()
        known = self.open.get(endpoint)
        if known is None:
            known = self.open[endpoint] = _OpenSocket(self.context, endpoint, is_ipv6)
            self.closed.pop(endpoint, None)
        return known

    def find(self, endpoint: str) -> Optional[_OpenSocket]:
        """Its socket, if there is one."""
        return self.open.get(endpoint) if self.process == os.getpid() else None

    def start(self) -> None:
        """Once in a process; a fork has its parent's sockets, and may use none of them."""
        if self.process == os.getpid():
            return
        self.process, self.open, self.callbacks = os.getpid(), {}, []
        self.closed.clear()
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        threading.Thread(target=self._monitor, name="PeerSockets", daemon=True).start()

    def _monitor(self) -> None:
        looked = time.monotonic()
        while not self.context.closed:
            time.sleep(POLL_INTERVAL_SECONDS)
            with self.lock:
                before, looked = looked, time.monotonic()
                stood_still = looked - before > SUSPENDED_SECONDS
                for endpoint, known in list(self.open.items()):
                    known.read_events()
                    if stood_still and known.lost_at is not None:
                        known.lost_at = looked  # it could not connect meanwhile
                    if known.is_gone():
                        known.close(linger=0)
                        del self.open[endpoint]
                        self.closed[endpoint] = known.lost_at
                while len(self.closed) > MAX_CLOSED_PEERS:
                    self.closed.popitem(last=False)
                self.callbacks = [look for look in self.callbacks if look() is not None]
                looks = [look() for look in self.callbacks]
            for look in looks:
                try:
                    if look is not None:
                        look()
                except Exception:
                    logger.exception("Peers could not be looked after")
            look = looks = None  # else their owners would live as long as this thread


_sockets = _SocketPool()


class PeerSocket:
    """Sends to one endpoint, from any thread; it never waits."""

    def __init__(self, endpoint: str, is_ipv6: bool = False):
        self.endpoint, self.is_ipv6 = endpoint, is_ipv6

    @classmethod
    def to(cls, host: str, port: int) -> PeerSocket:
        """The socket to this IP address, or name, and port."""
        host = host.strip("[]")
        is_ipv6 = ":" in host
        return cls(f"tcp://[{host}]:{port}" if is_ipv6 else f"tcp://{host}:{port}", is_ipv6)

    def open(self) -> None:
        """Connect, if nothing was sent before; that a peer is silent is known from then on."""
        with _sockets.lock:
            _sockets.get_or_open(self.endpoint, self.is_ipv6)

    def send_multipart(self, frames: List[bytes]) -> None:
        """Hand over a message, also before the peer is connected, or connected again.

        Raises:
            zmq.Again: The peer takes none, and `MAX_QUEUED_MESSAGES` wait for it already.
        """
        with _sockets.lock:
            known = _sockets.get_or_open(self.endpoint, self.is_ipv6)
            known.used = time.monotonic()  # it is not closed for `GONE_SECONDS`
        with known.sending:
            known.sock.send_multipart(frames, zmq.NOBLOCK)

    def silent_for(self) -> float:
        """Seconds for which there has been no connection; 0 while there is.

        It is lost when the peer ends, and `HEARTBEAT_TIMEOUT_MS` after it stops or its packets
        vanish; that is noted within `POLL_INTERVAL_SECONDS`. Infinite where nothing was ever sent, or the
        peer has long gone.
        """
        known = _sockets.find(self.endpoint)
        if known is not None and known.lost_at is None:  # asked with each message: no lock
            return 0.0
        with _sockets.lock:
            known = _sockets.find(self.endpoint)
            if known is None:
                lost_at = _sockets.closed.get(self.endpoint, -math.inf)
            else:
                if known.lost_at is not None:  # that one is lost is seen by the thread, soon enough
                    known.read_events()
                lost_at = known.lost_at
            return 0.0 if lost_at is None else time.monotonic() - lost_at

    def lost_for(self) -> float:
        """As `silent_for`; 0 also while the first connection is being made."""
        with _sockets.lock:
            known = _sockets.find(self.endpoint)
            if known is not None:
                known.read_events()
                if not known.was_connected:
                    return 0.0
        return self.silent_for()

    def note_alive(self) -> None:
        """The peer lives, as is known from elsewhere: its silence begins anew."""
        with _sockets.lock:
            known = _sockets.find(self.endpoint)
            if known is not None and known.lost_at is not None:
                known.lost_at = time.monotonic()


class ConnectionSnapshot:
    """One look at prefill ranks, by their `rank_ip` and `rank_port`.

    Each socket is asked once, for hundreds of rooms may wait for the same ranks.
    """

    def __init__(self, silent_seconds: float):
        self.silent_seconds = silent_seconds
        self._seconds = functools.cache(_seconds_disconnected)

    def is_silent(self, rank: dict) -> bool:
        """Whether requests that wait for it are to fail."""
        return self._seconds(rank["rank_ip"], rank["rank_port"])[0] >= self.silent_seconds

    def is_lost(self, rank: dict) -> bool:
        """Whether it may have been started anew, so that its server is to be asked again."""
        lost_for = self._seconds(rank["rank_ip"], rank["rank_port"])[1]
        return lost_for >= LOST_SECONDS or self.is_silent(rank)


def _seconds_disconnected(host: str, port: int) -> Tuple[float, float]:
    """Seconds without a connection to a rank, and without one that there was before."""
    socket = PeerSocket.to(host, port)
    return socket.silent_for(), socket.lost_for()


def call_periodically(look: Callable[[], None]) -> None:
    """Have a method called every half second, as long as its object lives; it must not wait."""
    with _sockets.lock:
        _sockets.start()
        if look not in [known() for known in _sockets.callbacks]:
            _sockets.callbacks.append(WeakMethod(look))


def open_sockets() -> List[str]:
    """Endpoints that have one."""
    with _sockets.lock:
        return list(_sockets.open) if _sockets.process == os.getpid() else []
