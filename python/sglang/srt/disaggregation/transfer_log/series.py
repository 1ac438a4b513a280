"""The values behind `/metrics`, by metric and labels, for a bounded number of peers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Set, Tuple

from .peers import PeerActivity

# Peers with series of their own; those beyond count as one.
MAX_PEERS = 64
OTHER_PEERS = "other"
# A peer's series go when nothing has happened with it for so long.
PEER_SECONDS = 3600.0
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

Labels = Tuple[str, ...]


@dataclass(frozen=True, eq=False)  # a key of tables, equal only to itself
class Metric:
    """One metric of Prometheus.

    Attributes:
        name: Without `_total`, which a counter's sample gets.
        kind: `counter`, `gauge` or `histogram`.
        labels: Names of its labels; `peer` is the other server.
        is_of_server: Each rank has the whole server's value: the largest counts, not their sum.
    """

    name: str
    kind: str
    labels: Labels
    help: str
    is_of_server: bool = False


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(f"sglang_pd_{name}", "counter", labels, help)


_WRITTEN = ("backend", "peer", "kind", "path")
BYTES = _counter(
    "transfer_bytes", "Bytes given to the transport; also those of failed writes.", *_WRITTEN
)
COPIES = _counter("descriptors", "Copies given to the transport.", *_WRITTEN)
TRANSFERS = Metric(
    "sglang_pd_transfer_seconds",
    "histogram",
    _WRITTEN,
    "Seconds from giving copies to the transport until they are written.",
)
ROOMS = Metric("sglang_pd_rooms", "gauge", ("side", "state"), "Requests in each state.")
ROOM_SECONDS = Metric(
    "sglang_pd_room_seconds",
    "histogram",
    ("side", "state"),
    "Seconds that requests were in each state.",
)
REQUESTS = _counter("requests", "Requests that ended.", "side", "peer", "ended")
FAILURES = _counter(
    "failures", "Failed requests, on the ranks that know why.", "side", "peer", "reason"
)
RECENT_FAILURES = Metric(
    "sglang_pd_failures_last_hour",
    "gauge",
    ("side", "peer", "reason"),
    "Failed requests of the last hour, on the ranks that know why.",
)
PEERS = Metric(
    "sglang_pd_peers",
    "gauge",
    ("side", "kind"),
    "Servers that this one knows, by how it serves them.",
    is_of_server=True,
)
MALFORMED = _counter("malformed_messages", "Messages dropped as unreadable.", "side")
VERIFIED = _counter("verified_requests", "Requests whose KV a rank compared.", "peer")
MISMATCHED = _counter("verified_mismatches", "Requests whose KV differed on a rank.", "peer")
STALLS = _counter(
    "stalls", "Times that KV transfer held up the scheduler for over 50 ms.", "side", "where"
)
STALL_SECONDS = _counter("stall_seconds", "Seconds of these times.", "side", "where")
LOST_EVENTS = _counter(
    "lost_events", "Events and request lines that are missing: too many, or a full disk.", "side"
)

METRICS = (
    *(BYTES, COPIES, TRANSFERS, ROOMS, ROOM_SECONDS, REQUESTS, FAILURES, RECENT_FAILURES),
    *(PEERS, MALFORMED, VERIFIED, MISMATCHED, STALLS, STALL_SECONDS, LOST_EVENTS),
)


@dataclass
class Histogram:
    """How many values fell into each bucket of `SECONDS`, the last one without limit."""

    counts: List[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0

    def add(self, value: float) -> None:
        """Adds a value, in seconds."""
        self.counts[bisect_left(SECONDS, value)] += 1
        self.sum += value


class Series:
    """Values of counters and gauges, and histograms, by metric and the values of its labels.

    Attributes:
        changes: How many changes there were, so that an unchanged series need not be written.
    """

    def __init__(self, activity: Optional[PeerActivity] = None):
        """activity: Of peers, shared with the ranks whose series are added to these."""
        self.values: Dict[Tuple[Metric, Labels], float] = {}
        self.histograms: Dict[Tuple[Metric, Labels], Histogram] = {}
        self.changes = 0
        self._activity = activity or PeerActivity()
        self._peers: Set[str] = set()
        self._active: Set[str] = set()  # since the last call of `expire`
        self._failures: Dict[int, Counter[Labels]] = {}  # by the minute

    def add(self, metric: Metric, amount: float, *labels: str) -> None:
        """Adds to a counter."""
        self.set(metric, self.values.get((metric, labels), 0.0) + amount, *labels)

    def add_failure(self, at: float, *labels: str) -> None:
        """Counts a failed request.

        Args:
            at: When it failed, in seconds since the epoch.
            labels: Its side, peer and reason.
        """
        self.add(FAILURES, 1, *labels)
        self._failures.setdefault(int(at // 60), Counter())[labels] += 1

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Sets a gauge."""
        if self.values.get((metric, labels)) != value:
            self.values[metric, labels] = value
            self.changes += 1

    def observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        """Adds seconds to a histogram."""
        self.histograms.setdefault((metric, labels), Histogram()).add(seconds)
        self.changes += 1

    def peer(self, name: str) -> str:
        """Returns the label of a server with which something happens now."""
        if name not in self._peers and len(self._peers) >= MAX_PEERS:
            return OTHER_PEERS
        self._peers.add(name)
        self._active.add(name)
        return name

    def expire(self, second: float) -> None:
        """Drops what is older than an hour: recent failures, and series of peers.

        Args:
            second: Since the epoch, the same on all ranks.

        Raises:
            OSError: See `PeerActivity.note`.
        """
        self._expire_failures(second)
        while self._active:
            self._activity.note(self._active.pop(), second)
        self._expire_peers(second)

    def _expire_failures(self, now: float) -> None:
        for minute in [one for one in self._failures if one < now // 60 - 60]:
            del self._failures[minute]
        recent = sum(self._failures.values(), Counter())
        for metric, labels in [one for one in self.values if one[0] is RECENT_FAILURES]:
            if labels not in recent:
                del self.values[metric, labels]
                self.changes += 1
        for labels, count in recent.items():
            self.set(RECENT_FAILURES, count, *labels)

    def _expire_peers(self, now: float) -> None:
        gone = {name for name in self._peers if now - self._activity.last(name) > PEER_SECONDS}
        for name in gone:
            self._peers.discard(name)
            self._activity.forget(name)
        for table in (self.values, self.histograms) if gone else ():
            for metric, labels in list(table):
                if "peer" in metric.labels and labels[metric.labels.index("peer")] in gone:
                    del table[metric, labels]
                    self.changes += 1

    def numbers(self) -> Iterator[Tuple[Metric, Labels, List[float]]]:
        """Yields each series: its metric, its labels' values, and its samples' numbers.

        `sample_names` names them. A bucket counts the values that fell into it alone.
        """
        for (metric, labels), value in self.values.items():
            yield metric, labels, [value]
        for (metric, labels), histogram in self.histograms.items():
            yield metric, labels, [histogram.sum, *histogram.counts]


def sample_names(metric: Metric, values: Labels) -> List[Tuple[str, Dict[str, str]]]:
    """Returns name and labels of each of a series' samples, as Prometheus's files have them.

    Args:
        values: Of the labels.
    """
    labels = dict(zip(metric.labels, values))
    if metric.kind == "histogram":
        bounds = (*map(str, SECONDS), "+Inf")
        buckets = [(f"{metric.name}_bucket", {**labels, "le": bound}) for bound in bounds]
        return [(f"{metric.name}_sum", labels), *buckets]
    return [(metric.name + ("_total" if metric.kind == "counter" else ""), labels)]
