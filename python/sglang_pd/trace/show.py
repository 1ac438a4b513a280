"""Shows traced requests: a table, one request's time, or JSON."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sglang_pd.trace.requests import SIDES, STATES, Request, Trace

BAR_WIDTH = 48
MARKS = {
    "bootstrapping": ("░", "waits for decode to ask"),
    "prefilling": ("▒", "computes, or waits for its turn"),
    "sending": ("█", "sends"),
    "allocating": ("░", "waits for pages, and for prefill's addresses"),
    "waiting": ("▒", "waits for prefill"),
    "receiving": ("█", "receives"),
    "interleaving": ("▓", "interleaves KV heads"),
    "queued": ("·", "waits to be scheduled"),
}


def as_json(requests: Sequence[Request], unread: int) -> dict:
    """Returns every figure; times are in seconds."""
    return {"requests": [_request_as_json(one) for one in requests], "unread_lines": unread}


def _request_as_json(request: Request) -> dict:
    times = {
        side: {
            state: seconds
            for state in STATES[side]
            if (seconds := request.seconds(side, state)) is not None
        }
        for side in SIDES
    }
    return {
        "room": request.room,
        "rid": request.rid,
        "prefill": request.prefill,
        "decode": request.decode,
        "tokens": request.tokens,
        "bytes": request.bytes,
        "copies": request.copies,
        "paths": request.paths,
        "seconds": times,
        "total": request.total,
        "ended": "failed" if request.failure else "success",
        "kind": request.failure,
        "reason": request.reason,
    }


def show(trace: Trace, requests: Sequence[Request], console: Console) -> None:
    """Prints a table of these requests, with the median of all.

    Args:
        trace: All requests.
        requests: Those to show.
    """
    figures = ("tokens", "MiB", "copies")
    states = [(side, state) for side in SIDES for state in STATES[side]]
    names = [Column(f"{side[0].upper()} {state}", justify="right") for side, state in states]
    table = Table(
        "room",
        "from, to",
        "sent as",
        *(Column(name, justify="right") for name in figures),
        *names,
        Column("total", justify="right"),
        "ended",
        title=f"{len(requests)} of {len(trace.requests)} requests; P: prefill, D: decode; seconds",
    )
    for request in requests:
        ended = Text(request.failure or "success", style="red" if request.failure else "green")
        table.add_row(
            str(request.room),
            f"{request.prefill}\n{request.decode}",
            ", ".join(request.paths),
            f"{request.tokens:,}",
            f"{request.bytes / 2**20:.1f}",
            f"{request.copies:,}",
            *(_seconds(request.seconds(*state)) for state in states),
            _seconds(request.total),
            ended,
        )
    if len(trace.requests) > 1:
        medians = [_median([one.seconds(*state) for one in trace.requests]) for state in states]
        total = _median([one.total for one in trace.requests])
        table.add_section()
        table.add_row("median of all", "", "", "", "", "", *map(_seconds, (*medians, total)), "")
    console.print(table)
    kinds = Counter(one.failure for one in trace.requests if one.failure)
    for kind, count in kinds.most_common():
        why = next(one.reason for one in trace.requests if one.failure == kind)
        console.print(Text(f"{count} failed: {kind}, such as: {why or 'no reason given'}", "red"))
    if trace.unread:
        console.print(f"{trace.unread} lines could not be read")
    missing = [side for side in SIDES if not any(one.ranks[side] for one in trace.requests)]
    if missing and trace.requests:
        console.print(f"no line of a {missing[0]} server; give its files, too")


def show_request(request: Request, console: Console) -> None:
    """Prints one request's time, a row for each rank."""
    console.print(f"room {request.room}, rid {request.rid or 'unknown'}: {sentence(request)}")
    total = request.total or 1.0
    table = Table("rank", "time", title=f"0 to {total:.3f} s")
    for side in SIDES:
        for record in request.ranks[side]:
            line = [" "] * BAR_WIDTH
            for *_, state, start, end in _bars_of(request, side, record.rank):
                first = round(start / total * BAR_WIDTH)
                last = max(first + 1, round(end / total * BAR_WIDTH))
                line[first:last] = MARKS[state][0] * (last - first)
            table.add_row(f"{side} {record.rank}", "".join(line[:BAR_WIDTH]))
    console.print(table)
    for side in SIDES:
        for state in STATES[side]:
            seconds = request.seconds(side, state)
            if seconds is not None:
                mark, what = MARKS[state]
                console.print(f"  {mark} {side} {what}: {seconds:.3f} s ({state})")
    if request.decode_shift:
        console.print(
            f"decode's clock is off by about {-request.decode_shift:.3f} s; shown by prefill's"
        )


def sentence(request: Request) -> str:
    """Returns who waited for whom, and how it ended."""
    waits = {
        "prefill waited for decode": request.seconds("prefill", "bootstrapping"),
        "decode waited for prefill": request.seconds("decode", "waiting"),
    }
    said = [f"{what} for {seconds:.3f} s" for what, seconds in waits.items() if seconds]
    ended = f"failed ({request.failure}): {request.reason}" if request.failure else "success"
    return "; ".join([*said, ended])


def _bars_of(request: Request, side: str, rank: str) -> Iterator[Any]:
    return (bar for bar in request.bars() if bar[:2] == (side, rank))


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f}"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
