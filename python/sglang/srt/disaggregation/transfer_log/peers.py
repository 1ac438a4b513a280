"""When something last happened with each peer, on any of this server's ranks on this host.

`/metrics` adds up the series of all ranks, so they must drop a peer's at the same time: a sum that
lost a part would look to Prometheus like a counter that starts anew.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Dict, Optional

# A peer's file is touched at most so often: a server may have many peers.
TOUCH_SECONDS = 60.0


class PeerActivity:
    """Last events by peer, to the minute; ranks that have the same folder share them."""

    def __init__(self, folder: Optional[Path] = None):
        """folder: Where files are touched, one for each peer; None to keep times in memory."""
        self.folder = folder
        self._last: Dict[str, float] = {}

    def note(self, peer: str, second: float) -> None:
        """Notes that something has happened with a peer.

        Raises:
            OSError: The folder is gone or full.
        """
        if second - self._last.get(peer, -TOUCH_SECONDS) < TOUCH_SECONDS:
            return
        if self.folder is not None:
            path = self._path(peer)
            path.touch()
            os.utime(path, (second, second))
        self._last[peer] = second

    def last(self, peer: str) -> float:
        """Returns when something last happened with a peer that was noted here."""
        try:
            return self._path(peer).stat().st_mtime if self.folder is not None else self._last[peer]
        except OSError:
            return self._last[peer]

    def forget(self, peer: str) -> None:
        """Forgets a peer on this rank; the others still know when it was last seen."""
        self._last.pop(peer, None)

    def _path(self, peer: str) -> Path:
        return self.folder / f"sglang-pd-peer-{hashlib.sha256(peer.encode()).hexdigest()[:16]}"
