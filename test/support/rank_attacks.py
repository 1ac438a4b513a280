"""What befalls a rank process that lives: packets to it vanish, or nobody reads its messages."""

import contextlib
import ctypes
import os
import socket
import struct
import threading

import zmq

# Linux's options, which `socket` does not name, and a filter that lets no packet pass.
ATTACH_FILTER, DETACH_FILTER = 26, 27
RETURN = 0x06
PROGRAM = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
FILTER = struct.pack("HL", 1, ctypes.addressof(PROGRAM))
POLL_INTERVAL_SECONDS = 0.02
# A message that says nothing. The engine's sockets take any number, and keep them in memory.
FLOOD = b"nothing" * 32
FLOODS = 20_000


class VanishingPackets:
    """From now on no TCP packet reaches this process; `stop` lets them through again.

    What it sends to others arrives, and their answers do not: no connection outlives that.
    """

    def __init__(self):
        self._ended = threading.Event()
        self._dropping = threading.Thread(target=self._drop, daemon=True)
        self._dropping.start()

    def stop(self) -> None:
        self._ended.set()
        self._dropping.join()
        _for_tcp_sockets(lambda sock: sock.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0))

    def _drop(self) -> None:
        """Also of connections that are made meanwhile."""
        while not self._ended.wait(POLL_INTERVAL_SECONDS):
            _for_tcp_sockets(lambda sock: sock.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, FILTER))


def _for_tcp_sockets(do) -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is gone
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    do(sock)


class UnreadMessages:
    """From the next message on this process reads none that ranks send it; `stop` reads again."""

    def __init__(self):
        self._may_read = may_read = threading.Event()
        receive = zmq.Socket.recv

        def receive_later(sock, *arguments, **options):
            while True:
                if sock.type == zmq.PULL:
                    may_read.wait()
                frame = receive(sock, *arguments, **options)
                if frame != FLOOD:
                    return frame

        zmq.Socket.recv = receive_later

    def stop(self) -> None:
        self._may_read.set()


ATTACKS = {"packets vanish": VanishingPackets, "messages stay unread": UnreadMessages}


def flood(send) -> int:
    """Send `FLOODS` messages, or until no more are taken; returns how many were."""
    for sent in range(FLOODS):
        try:
            send([FLOOD], zmq.NOBLOCK)
        except zmq.Again:
            return sent
    return FLOODS
