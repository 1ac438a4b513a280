"""Prefill: requests of a decode rank that does not answer fail, and nothing is sent to it.

no connection for some seconds    its open rooms fail, and those that it asks for
connected, or a message of it     it is served again
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Dict

from sglang.srt.disaggregation.pd import peer_sockets
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.variables import seconds_of

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_PD_SILENT_SECONDS"
DEFAULT_SECONDS = 10.0
# After a link was cut for a moment, ZeroMQ may take as long to connect again.
LEAST_SECONDS = 5.0


class NoticesSilence:
    """A prefill rank's KV manager.

    `transfer_infos` has the decode ranks of each room by name. It has `fail_silent(room, reason)`
    and `is_back(name)`.
    """

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.silent_seconds = seconds_of(VARIABLE, DEFAULT_SECONDS, LEAST_SECONDS)
        # Decode ranks that have registered, and that we have a socket to, or had.
        self.met: Dict[str, Any] = {}
        # Why nothing is sent to these.
        self.silent: Dict[str, str] = {}
        self.look_lock = threading.Lock()
        return self

    def meet(self, name: str, info: Any) -> None:
        """A decode rank registers: connect to it now, not when the first request ends."""
        try:
            PeerSocket.to(info.endpoint, info.dst_port).open()
            self.met[name] = info
            peer_sockets.look_after(self.look_at_peers)
        except Exception as error:
            logger.warning(f"Decode {info.endpoint}:{info.dst_port}: {error}")

    def heard(self, name: str, info: Any) -> None:
        """A message of this decode rank has come: it lives, and has as long again."""
        socket = PeerSocket.to(info.endpoint, info.dst_port)
        if socket.silent_for():
            socket.open()
            socket.note_heard()
            if name in self.silent:
                self.look_at_peers()

    def look_at_peers(self) -> None:
        """Note who is silent, fail its rooms, and take up again with who is back."""
        with self.look_lock:
            self._look_at_peers()

    def _look_at_peers(self) -> None:
        silent = {}
        for name, info in list(self.met.items()):
            seconds = PeerSocket.to(info.endpoint, info.dst_port).silent_for()
            if seconds >= self.silent_seconds:
                silent[name] = (
                    f"decode {info.endpoint}:{info.dst_port} has not answered for "
                    f"{self.silent_seconds:g} s ({VARIABLE})"
                )
        back = self.silent.keys() - silent.keys()
        for name in silent.keys() - self.silent.keys():
            logger.error(f"{silent[name]}; its requests fail until it does")
        self.silent = silent
        for name in back:
            logger.info(f"Decode {name} answers again")
            self.is_back(name)
        if silent:
            for room in list(self.transfer_infos):
                reason = self.why_silent(room)
                if reason:
                    self.fail_silent(room, reason)

    def why_silent(self, room: int) -> str:
        """Why nothing of this room may be sent; empty if it may."""
        silent = self.silent
        if silent:
            for name in list(self.transfer_infos.get(room, ())):
                if name in silent:
                    return silent[name]
        return ""
