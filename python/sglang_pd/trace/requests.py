"""Reads the lines of `SGLANG_PD_REQUEST_LOG`, and joins those of one request on all ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from sglang_pd.engine_free import load

_log = load("transfer_log")
Record, STATES = _log.RequestRecord, _log.STATES
SIDES = tuple(STATES)
# After these states decode has everything.
ARRIVED = ("allocating", "waiting", "receiving")


@dataclass
class Request:
    """One request: its records by side, and by rank.

    Attributes:
        ranks: For each side, the records of its ranks, in the order of their names.
    """

    ranks: dict[str, list[Any]] = field(default_factory=lambda: {side: [] for side in SIDES})

    @property
    def records(self) -> list[Any]:
        return [record for side in SIDES for record in self.ranks[side]]

    def _first(self, name: str, side: str | None = None) -> Any:
        records = self.records if side is None else self.ranks[side]
        return next((value for one in records if (value := getattr(one, name))), "")

    @property
    def room(self) -> int:
        return self.records[0].room

    @property
    def rid(self) -> str:
        return self._first("rid")

    @property
    def tokens(self) -> int:
        return max(record.tokens for record in self.records)

    @property
    def decode(self) -> str:
        """The decode server's name, as prefill knows it."""
        return self._first("peer", "prefill")

    @property
    def prefill(self) -> str:
        """The prefill server's bootstrap address, as decode knows it."""
        return self._first("peer", "decode")

    @property
    def bytes(self) -> int:
        """Bytes that all prefill ranks gave to the transport."""
        return sum(record.bytes for record in self.ranks["prefill"])

    @property
    def copies(self) -> int:
        return sum(record.copies for record in self.ranks["prefill"])

    @property
    def paths(self) -> list[str]:
        return sorted({path for record in self.ranks["prefill"] for path in record.paths})

    @property
    def failure(self) -> str:
        """The kind of failure; empty if no rank failed, `another_rank` only if none knows more."""
        kinds = [record.kind for record in self.records if record.ended == "failed"]
        known = [kind for kind in kinds if kind != "another_rank"]
        return next(iter(known or kinds), "")

    @property
    def reason(self) -> str:
        return self._first("reason")

    def seconds(self, side: str, state: str) -> float | None:
        """Returns how long the side's slowest rank was in a state; None if none was."""
        found = [one.seconds[state] for one in self.ranks[side] if state in one.seconds]
        return max(found, default=None)

    @property
    def decode_shift(self) -> float:
        """Seconds to add to decode's clock: the least that puts causes before their effects.

        Decode asks before prefill knows of it, and has everything only after prefill has sent it.
        Of a failed request, which may not have come so far, prefill must at least have begun.
        """
        asks = [_end(one, ("allocating",)) for one in self.ranks["decode"]]
        began = [one for one in self.ranks["prefill"] if "prefilling" in one.seconds]
        asked = [_end(one, ("bootstrapping",)) for one in began]
        if not (asks and asked):
            return 0.0
        most = max(asked) - max(asks)
        if self.failure:
            return min(0.0, most)
        sent = [_end(one, STATES["prefill"]) for one in self.ranks["prefill"]]
        arrived = [_end(one, ARRIVED) for one in self.ranks["decode"]]
        least = max(sent) - max(arrived)
        return (least + most) / 2 if least > most else min(max(0.0, least), most)

    def bars(self) -> Iterator[tuple[str, str, str, float, float]]:
        """Yields each state of each rank: side, rank, state, and when it began and ended.

        Times are in seconds since the first of them, by prefill's clock.
        """
        shift = {"prefill": 0.0, "decode": self.decode_shift}
        starts = [record.opened + shift[record.side] for record in self.records]
        for record, start in zip(self.records, starts):
            at = start - min(starts)
            for state, seconds in record.seconds.items():
                yield record.side, record.rank, state, at, at + seconds
                at += seconds

    @property
    def total(self) -> float:
        """Seconds from when the first rank got the request until the last was done with it."""
        return max((end for *_, end in self.bars()), default=0.0)


def _end(record: Any, states: Sequence[str]) -> float:
    return record.opened + sum(record.seconds.get(state, 0.0) for state in states)


@dataclass
class Trace:
    """All requests, in the order in which they came, and how many lines could not be read."""

    requests: list[Request]
    unread: int = 0


def read(files: Iterable[Path]) -> Trace:
    """Reads these files, of both sides and of any number of ranks.

    Raises:
        OSError: A file cannot be read.
    """
    decoder = msgspec.json.Decoder(Record)
    records, unread = [], 0
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    record = decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):  # a line may be half written
                    unread += 1
                    continue
                unread += record.side not in SIDES
                records += [record] if record.side in SIDES else []
    return Trace(join(records), unread)


def join(records: Iterable[Any]) -> list[Request]:
    """Joins the records of one request. A room that is used again is another request."""
    found: dict[tuple[int, int], Request] = defaultdict(Request)
    seen: dict[tuple, int] = defaultdict(int)
    for record in sorted(records, key=lambda one: (one.opened, one.rank)):
        who = (record.room, record.side, record.rank)
        found[record.room, seen[who]].ranks[record.side].append(record)
        seen[who] += 1
    for request in found.values():
        for side in SIDES:
            request.ranks[side].sort(key=lambda one: one.rank)
    return sorted(found.values(), key=lambda one: min(record.opened for record in one.records))
