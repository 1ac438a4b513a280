"""One line of JSON for each request on each rank: how it went, and how long each part took."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Dict, List, Optional

import msgspec

VARIABLE = "SGLANG_PD_REQUEST_LOG"


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """How a request went on one rank.

    Attributes:
        side: `prefill` or `decode`.
        rank: Such as `DP 0 TP 1/2 PP 0/1`.
        room: Its bootstrap room.
        rid: The request's id, as clients and the engine's own logs have it.
        peer: The other server's name, such as `10.0.0.2:30000`; empty if it is not known.
        opened: When the rank got the request, seconds since the epoch.
        tokens: Tokens of the prompt.
        bytes, copies: What this rank gave to the transport, all chunks, state and metadata.
        paths: How the KV was sent: `whole` pages, `slices`, `packed`, or by the `engine`'s code.
        seconds: How long the request was in each state, see `rooms.STATES`, in this order.
        ended: `success` or `failed`.
        kind, reason: Of a failure, see `failures.failure_kind`.
    """

    side: str
    rank: str
    room: int
    opened: float
    rid: str = ""
    peer: str = ""
    tokens: int = 0
    bytes: int = 0
    copies: int = 0
    paths: List[str] = []
    seconds: Dict[str, float] = {}
    ended: str = ""
    kind: str = ""
    reason: str = ""


class RecordFile:
    """Appends records to a file of this process's own."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)  # `tail -f` shows lines at once
        self._start = b""

    def write(self, records: List[RequestRecord]) -> None:
        """Appends these records.

        Raises:
            OSError: Not all of them are written, such as on a full disk; the last line may be torn.
        """
        lines = self._start + b"".join(msgspec.json.encode(one) + b"\n" for one in records)
        self._start = b"\n"
        if self._file.write(lines) != len(lines):
            raise OSError(f"{self._file.name}: no space for all lines")
        self._start = b""


def records_folder() -> str:
    """Returns the folder for records; empty if none are to be written."""
    return os.environ.get(VARIABLE, "")


def record_file(side: str, rank: str) -> Optional[RecordFile]:
    """Returns the file in the folder that `SGLANG_PD_REQUEST_LOG` names; None if it is unset.

    Raises:
        OSError: The folder cannot be written; the server must not start.
    """
    folder = records_folder()
    if not folder:
        return None
    # Hosts may share the folder.
    place = (socket.gethostname(), str(os.getpid()))
    name = "-".join([side, *rank.lower().replace("/", "of").split(), *place])
    return RecordFile(Path(folder) / f"{name}.jsonl")
