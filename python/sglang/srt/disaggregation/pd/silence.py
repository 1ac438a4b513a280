"""Prefill: requests of a decode rank that does not answer fail, and nothing is sent to it.

no connection for some seconds    its open rooms fail, and those that it asks for
connected, or a message of it     it is served again
no connection for ten minutes     what can be made anew is let go; it may come back as it was
too many are so long silent       those that are it longest are forgotten, and must register
another one has its endpoint      its process is gone: its rooms fail, and it is forgotten
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any, Dict, List, Set, Tuple

from sglang.srt.disaggregation.pd import peer_sockets
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.variables import seconds_of

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_PD_SILENT_SECONDS"
DEFAULT_SECONDS = 10.0
# After a link was cut for a moment, ZeroMQ may take as long to connect again.
LEAST_SECONDS = 5.0
# From then on a decode rank that has no room here rests.
REST_SECONDS = 600.0
# So many rest; a fleet may be cut off for an hour.
MAX_RESTING = 256


class NoticesSilence:
    """A prefill rank's KV manager.

    `transfer_infos` has the decode ranks of each room by name, `decode_kv_args_table` all that have
    registered. It has `fail_silent(room, reason)` and `is_back(name)`.
    """

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.silent_seconds = seconds_of(VARIABLE, DEFAULT_SECONDS, LEAST_SECONDS)
        # Decode ranks that have registered, and that we have a socket to, or had.
        self.met: Dict[str, Any] = {}
        # Why nothing is sent to these.
        self.silent: Dict[str, str] = {}
        self.resting: Set[str] = set()
        # Those whose endpoint is another's by now.
        self.replaced: Set[str] = set()
        self.look_lock = threading.Lock()
        return self

    def meet(self, name: str, info: Any) -> None:
        """A decode rank registers: connect to it now, not when the first request ends."""
        try:
            PeerSocket.to(info.endpoint, info.dst_port).open()
            with self.look_lock:
                self._meet(name, info)
            peer_sockets.look_after(self.look_at_peers)
            self.heard(name, info)
        except Exception as error:
            logger.warning(f"Decode {info.endpoint}:{info.dst_port}: {error}")

    def _meet(self, name: str, info: Any) -> None:
        place = (info.endpoint, info.dst_port)
        for other, known in list(self.met.items()):
            if other != name and (known.endpoint, known.dst_port) == place:
                self.replaced.add(other)
        self.met[name] = info
        self.replaced.discard(name)
        self.resting.discard(name)

    def heard(self, name: str, info: Any) -> None:
        """A message of this decode rank has come: it lives, and has as long again."""
        socket = PeerSocket.to(info.endpoint, info.dst_port)
        if socket.silent_for():
            socket.open()
            socket.note_heard()
        if name in self.silent and name not in self.replaced:
            self.look_at_peers()

    def look_at_peers(self) -> None:
        """Note who is silent, fail its rooms, and take up again with who is back."""
        with self.look_lock:
            self._look_at_peers()

    def _look_at_peers(self) -> None:
        silent, long_silent = {}, []
        for name, info in list(self.met.items()):
            seconds = PeerSocket.to(info.endpoint, info.dst_port).silent_for()
            why = f"has not answered for {self.silent_seconds:g} s ({VARIABLE})"
            if name in self.replaced:
                seconds, why = math.inf, "is another process by now"
            if seconds >= self.silent_seconds:
                silent[name] = f"decode {info.endpoint}:{info.dst_port} {why}"
            if seconds >= REST_SECONDS:
                long_silent.append((seconds, name))
        back = self.silent.keys() - silent.keys()
        for name in silent.keys() - self.silent.keys():
            if name in self.replaced:
                logger.warning(f"{silent[name]}, and its requests fail")
            else:
                logger.error(f"{silent[name]}; its requests fail until it does")
        self.silent = silent
        for name in back:
            self.resting.discard(name)
            logger.info(f"Decode {name} answers again")
            self.is_back(name)
        if silent:
            for room in list(self.transfer_infos):
                reason = self.why_silent(room)
                if reason:
                    self.fail_silent(room, reason)
        self._let_go(sorted(long_silent))

    def in_use(self) -> Set[str]:
        """Decode ranks that have rooms here."""
        return {name for peers in list(self.transfer_infos.values()) for name in list(peers)}

    def _let_go(self, long_silent: List[Tuple[float, str]]) -> None:
        """Have these rest, or forget them, the longest silent last; not while they are in use."""
        more = max(0, len(long_silent) - MAX_RESTING)
        forgotten = {name for _, name in long_silent[len(long_silent) - more :]} | self.replaced
        waking = [name for _, name in long_silent if name not in self.resting]
        if not (forgotten or waking):
            return
        busy = self.in_use()
        self.resting.update(name for name in waking if name not in busy and self.rest(name))
        for name in forgotten & self.resting - busy:
            self._forget(name)

    def _forget(self, name: str) -> None:
        info = self.met.pop(name)
        logger.info(f"Decode {info.endpoint}:{info.dst_port} ({name}) is gone, and forgotten")
        self.silent = {one: why for one, why in self.silent.items() if one != name}
        self.resting.discard(name)
        self.replaced.discard(name)
        if self.decode_kv_args_table.get(name) is info:
            del self.decode_kv_args_table[name]
        self.drop(name)

    def rest(self, name: str) -> bool:
        """Let go what is made anew when this decode rank asks for a room; whether that was done."""
        return True

    def drop(self, name: str) -> None:
        """Forget what else is kept of it; it must register if it comes back."""

    def why_silent(self, room: int) -> str:
        """Why nothing of this room may be sent; empty if it may."""
        silent = self.silent
        if silent:
            for name in list(self.transfer_infos.get(room, ())):
                if name in silent:
                    return silent[name]
        return ""
