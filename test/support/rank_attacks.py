"""Attacks on a live rank process: packets to it vanish, or it does not read its messages."""

import contextlib
import ctypes
import socket
import struct
import threading

import zmq
from rank_faults import own_sockets

# Linux's socket options, which `socket` does not name, and a filter that drops every packet.
ATTACH_FILTER, DETACH_FILTER = 26, 27
RETURN = 0x06
PROGRAM = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0))
FILTER = struct.pack("HL", 1, ctypes.addressof(PROGRAM))
POLL_INTERVAL_SECONDS = 0.02
# A meaningless message. The engine's sockets accept any number of them, and keep them in memory.
FLOOD = b"nothing" * 32
FLOODS = 20_000


class VanishingPackets:
    """Drops all TCP packets to this process until `stop`.

    Packets that this process sends arrive, but the answers do not, so no connection survives.
    """

    def __init__(self):
        self._ended = threading.Event()
        self._dropping = threading.Thread(target=self._drop, daemon=True)
        self._dropping.start()

    def stop(self) -> None:
        self._ended.set()
        self._dropping.join()
        self._set_option(DETACH_FILTER, 0)

    def _drop(self) -> None:
        """Attaches the filter again and again, also to connections that are new."""
        while not self._ended.wait(POLL_INTERVAL_SECONDS):
            self._set_option(ATTACH_FILTER, FILTER)

    @staticmethod
    def _set_option(name: int, value) -> None:
        for sock in own_sockets(socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # it has no such filter
                sock.setsockopt(socket.SOL_SOCKET, name, value)


class UnreadMessages:
    """Makes this process read no messages of other ranks until `stop`."""

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
    """Sends up to `FLOODS` messages until the socket accepts no more; returns how many it did."""
    for sent in range(FLOODS):
        try:
            send([FLOOD], zmq.NOBLOCK)
        except zmq.Again:
            return sent
    return FLOODS
