"""Prefill: fails the requests of a decode rank that does not answer, and sends nothing to it.

no connection for some seconds    its open rooms fail, and rooms that it requests
connected, or it sends a message  it is served again
no connection for ten minutes     what can be remade is released; the rank may come back as it was
too many ranks silent that long   those silent longest are dropped, and must register again
another rank has its endpoint     its process is gone: its rooms fail, and it is dropped
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any, Dict, List, Set, Tuple

from sglang.srt.disaggregation.pd import peer_sockets
from sglang.srt.disaggregation.pd.environment import seconds_of
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.per_instance import PerInstance

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_PD_SILENT_SECONDS"
DEFAULT_SECONDS = 10.0
# After a link was cut for a moment, ZeroMQ may take this long to reconnect.
MIN_SECONDS = 5.0
# A decode rank that is silent this long, and has no room here, is released.
RELEASE_AFTER_SECONDS = 600.0
# Ranks that may stay released; a fleet may be cut off for an hour.
MAX_RELEASED_PEERS = 256


def read_silent_seconds() -> float:
    """Returns after how many seconds without a connection a peer is silent.

    A server calls it at startup, too: a wrong value must stop the server, not one of its threads.

    Raises:
        ValueError: `SGLANG_PD_SILENT_SECONDS` is not a number of at least `MIN_SECONDS`.
    """
    return seconds_of(VARIABLE, DEFAULT_SECONDS, MIN_SECONDS)


class SilenceWatch:
    """Base of a prefill rank's KV manager.

    The manager has `transfer_infos`, each room's decode ranks by name; `decode_kv_args_table`, all
    registered decode ranks by name; `fail_room_of_silent_peer(room, reason)`; and
    `handle_peer_recovered(name)`.
    """

    silent_seconds = PerInstance(read_silent_seconds)
    # Registered decode ranks to which we have or had a socket.
    watched_peers: Dict[str, Any] = PerInstance(dict)
    # Why nothing is sent to each silent rank.
    silent_peers: Dict[str, str] = PerInstance(dict)
    released_peers: Set[str] = PerInstance(set)
    # Ranks whose endpoint now belongs to another rank.
    replaced_peers: Set[str] = PerInstance(set)
    check_lock = PerInstance(threading.Lock)

    def watch_peer(self, name: str, info: Any) -> None:
        """Connects to a decode rank when it registers, not when its first request ends.

        Args:
            info: The rank's registration.
        """
        try:
            PeerSocket.to(info.endpoint, info.dst_port).open()
            with self.check_lock:
                self._watch_peer(name, info)
            peer_sockets.call_periodically(self.check_peers)
            self.note_peer_alive(name, info)
        except Exception as error:
            logger.warning(
                f"Decode {info.endpoint}:{info.dst_port} is not watched; if it hangs, its "
                f"requests fail only at their time-out: {error}"
            )

    def _watch_peer(self, name: str, info: Any) -> None:
        place = (info.endpoint, info.dst_port)
        for other, known in list(self.watched_peers.items()):
            if other != name and (known.endpoint, known.dst_port) == place:
                self.replaced_peers.add(other)
        self.watched_peers[name] = info
        self.replaced_peers.discard(name)
        self.released_peers.discard(name)

    def note_peer_alive(self, name: str, info: Any) -> None:
        """Restarts a decode rank's silence, because the rank has sent a message."""
        socket = PeerSocket.to(info.endpoint, info.dst_port)
        if socket.silent_for():
            socket.open()
            socket.note_alive()
        if name in self.silent_peers and name not in self.replaced_peers:
            self.check_peers()

    def check_peers(self) -> None:
        """Notes which ranks are silent, fails their rooms, and serves ranks that are back."""
        with self.check_lock:
            self._check_peers()

    def _check_peers(self) -> None:
        silent, long_silent = {}, []
        for name, info in list(self.watched_peers.items()):
            seconds = PeerSocket.to(info.endpoint, info.dst_port).silent_for()
            if name in self.replaced_peers:
                seconds, why = math.inf, "was replaced by another process"
            elif seconds >= self.silent_seconds:
                why = f"has not answered for {self.silent_seconds:g} s ({VARIABLE})"
            else:
                continue
            silent[name] = f"decode {info.endpoint}:{info.dst_port} {why}"
            if seconds >= RELEASE_AFTER_SECONDS:
                long_silent.append((seconds, name))
        back = self.silent_peers.keys() - silent.keys()
        for name in silent.keys() - self.silent_peers.keys():
            if name in self.replaced_peers:
                logger.warning(f"{silent[name]}; its requests fail")
            else:
                logger.error(f"{silent[name]}; its requests fail until it does")
        self.silent_peers = silent
        for name in back:
            self.released_peers.discard(name)
            logger.info(f"Decode {name} answers again")
            self.handle_peer_recovered(name)
        if silent:
            for room in list(self.transfer_infos):
                reason = self.silence_reason(room)
                if reason:
                    self.fail_room_of_silent_peer(room, reason)
        self._release_silent_peers(sorted(long_silent))

    def peers_in_use(self) -> Set[str]:
        """Returns the decode ranks that have rooms here."""
        return {name for peers in list(self.transfer_infos.values()) for name in list(peers)}

    def _release_silent_peers(self, long_silent: List[Tuple[float, str]]) -> None:
        """Releases these ranks and drops the excess, the longest silent; none while in use.

        Args:
            long_silent: Seconds of silence and name of each rank, in ascending order.
        """
        more = max(0, len(long_silent) - MAX_RELEASED_PEERS)
        forgotten = {
            name for _, name in long_silent[len(long_silent) - more :]
        } | self.replaced_peers
        unreleased = [name for _, name in long_silent if name not in self.released_peers]
        if not (forgotten or unreleased):
            return
        busy = self.peers_in_use()
        self.released_peers.update(
            name for name in unreleased if name not in busy and self.release_peer(name)
        )
        for name in forgotten & self.released_peers - busy:
            self._drop_silent_peer(name)

    def _drop_silent_peer(self, name: str) -> None:
        info = self.watched_peers.pop(name)
        logger.info(f"Dropped decode {info.endpoint}:{info.dst_port} ({name}), which is gone")
        self.silent_peers = {one: why for one, why in self.silent_peers.items() if one != name}
        self.released_peers.discard(name)
        self.replaced_peers.discard(name)
        if self.decode_kv_args_table.get(name) is info:
            del self.decode_kv_args_table[name]
        self.drop_peer(name)

    def release_peer(self, name: str) -> bool:
        """Releases what is remade when this rank requests a room; returns whether it did so."""
        return True

    def drop_peer(self, name: str) -> None:
        """Drops what else is kept of this rank, which must register again if it comes back."""

    def silence_reason(self, room: int) -> str:
        """Returns why nothing of this room may be sent; "" if it may."""
        silent = self.silent_peers
        if silent:
            for name in list(self.transfer_infos.get(room, ())):
                if name in silent:
                    return silent[name]
        return ""
