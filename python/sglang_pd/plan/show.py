"""Shows a summary of a pair, as tables or as JSON."""

from collections.abc import Iterable
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_pd.plan.known_failures import LOGPROBS, RETRACTS, RIGHT, UNKNOWN
from sglang_pd.plan.links import TOKENS, Link, SentPart
from sglang_pd.plan.pair import ServerPair
from sglang_pd.plan.summary import Summary
from sglang_pd.plan.verdict import Verdict

# Events whose effect depends on the pair; a stray message harms any pair.
EVENT_TEXTS = {LOGPROBS: "with logprobs", RETRACTS: "if decode retracts"}


def as_json(summary: Summary) -> dict:
    """Returns every figure; sizes are in bytes, or in tokens where the key says so."""
    pair = summary.pair
    return {
        "model": {"name": pair.model.name, "title": pair.model.title, "layers": pair.model.layers},
        "engine_release": pair.release,
        "backend": pair.backend,
        "works": summary.works,
        "stock": msgspec.to_builtins(summary.stock),
        "patched": msgspec.to_builtins(summary.patched),
        **{side: _side(summary, side) for side in pair.sides},
        "links": [_link(link) for link in summary.links],
        "request": summary.totals,
        "notes": summary.notes,
    }


def _side(summary: Summary, side: str) -> dict:
    sizes = summary.pair.sides[side]
    stages = summary.pair.stages[side == "decode"]
    token, request = summary.rank_bytes(side)
    return {
        **msgspec.to_builtins(sizes),
        "attention_tp": sizes.attention_tp,
        "ranks": sizes.tp * sizes.pp,
        "stages": [[stage.start, stage.stop] for stage in stages],
        "bytes_a_token": token,
        "bytes_a_request": request,
    }


def _link(link: Link) -> dict:
    return {
        "prefill": link.prefill._asdict(),
        "decode": link.decode._asdict(),
        "sends": [
            {"component": component, "draft": draft, "heads": heads, "layers": layers}
            for (component, draft, heads), layers in _runs(link.parts)
        ],
        "bytes": link.bytes,
        "copies_at_least": link.min_copies,
        "copies_at_most": link.most,
        "messages": link.messages,
    }


def _runs(parts: Iterable[SentPart]) -> list[tuple[tuple, list[int]]]:
    """Groups adjacent parts as ((component, is draft, heads), layers)."""
    alike = groupby(parts, key=lambda one: (one.component, one.draft, one.heads))
    return [(key, [one.layer for one in some]) for key, some in alike]


def show(summary: Summary, console: Console) -> None:
    """Prints the verdicts, both servers, which rank sends what, and a request's totals."""
    pair = summary.pair
    _print(console, f"{pair.model.name}: {pair.model.title}")
    fia = ", ASCEND_USE_FIA" if pair.fia else ""
    _print(console, f"SGLang {pair.release}, {pair.backend}, page size {pair.pages}{fia}")
    tables = [_verdicts(summary), _servers(summary)]
    if summary.links:
        tables.append(_links(summary))
    for table in tables:
        console.print()
        console.print(table, soft_wrap=False)
    if summary.links or summary.notes:
        console.print()
    for line in (*totals(summary), *summary.notes):
        _print(console, line)


def compare(first: Summary, second: Summary, console: Console) -> None:
    """Prints two pairs of one model side by side."""
    model = first.pair.model
    _print(console, f"{model.name}: {model.title}")
    table = _table("", *(title(one.pair) for one in (first, second)))
    for rows in zip(_figures(first), _figures(second), strict=True):
        (name, ours), (_, theirs) = rows
        table.add_row(name, ours, theirs)
    console.print()
    console.print(table, soft_wrap=False)
    console.print()
    for note in dict.fromkeys([*first.notes, *second.notes]):
        _print(console, note)


def title(pair: ServerPair) -> str:
    """Returns a title such as `tp=4,pp=2 to tp=2`."""
    return f"{pair.prefill} to {pair.decode}"


def totals(summary: Summary) -> list[str]:
    """Describes a request's totals in a line; empty if the pair is refused."""
    if not summary.links:
        return []
    some = summary.totals
    copies = f"{some['copies_at_most']:,} copies"
    if some["copies_at_least"] < some["copies_at_most"]:
        copies = f"{some['copies_at_least']:,} copies (contiguous pages) to {copies} (scattered)"
    pairs = f"{some['links']} pair{'s' * (some['links'] != 1)} of ranks"
    return [
        f"A request of {TOKENS} tokens: {size(some['bytes'])} over {pairs}, "
        f"in {copies}; {some['messages']} messages."
    ]


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=False)


def _table(*headings: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        justify = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def _verdicts(summary: Summary) -> Table:
    table = _table("engine", "verdict", "why")
    for name in ("stock", "patched"):
        verdict: Verdict = getattr(summary, name)
        table.add_row(name, _outcome(verdict), _reasons(verdict))
        for event, called in EVENT_TEXTS.items():
            if verdict_on_event := verdict.on.get(event):
                table.add_row(f"  {called}", _outcome(verdict_on_event), _reasons(verdict_on_event))
    return table


def _outcome(verdict: Verdict) -> Text:
    colours = {RIGHT: "green", UNKNOWN: "yellow"}
    return Text(verdict.outcome, colours.get(verdict.outcome, "red"))


def _reasons(verdict: Verdict) -> Text:
    record = f" ({verdict.record})" if verdict.record else ""
    return Text("; ".join(verdict.reasons) + record)


def _servers(summary: Summary) -> Table:
    right = ("ranks", "groups", "bytes per token")
    table = _table("server", "ranks", "groups", "each", "layers", "heads", *right[2:], right=right)
    for name, sizes in summary.pair.sides.items():
        stages = summary.pair.stages[name == "decode"]
        each = f"TP {sizes.attention_tp} PP {sizes.pp}"
        layers = "+".join(str(len(stage)) for stage in stages)
        heads = _heads_of_rank(summary.pair, sizes.attention_tp)
        token, request = summary.rank_bytes(name)
        held = f"{token:,}" + (f" and {size(request)} per request" if request else "")
        ranks = (str(sizes.tp * sizes.pp), str(sizes.dp))
        table.add_row(name, *ranks, each, layers, heads, held)
    return table


def _heads_of_rank(pair: ServerPair, tp: int) -> str:
    total = pair.model.kv_heads
    if total is None:
        return "latent"
    if total % tp and tp % total:
        return f"{total}, not divisible"
    return f"{max(1, total // tp)} of {total}" + (", replicated" if tp > total else "")


def _links(summary: Summary) -> Table:
    right = ("MiB", "copies at most")
    table = _table("prefill rank", "decode rank", "layers", "heads", *right, right=right)
    for link in summary.links:
        ranks = (str(link.prefill), str(link.decode))
        if link.parts:
            figures = (f"{link.bytes / 2**20:,.1f}", f"{link.most:,}")
            table.add_row(*ranks, layers_of(link), heads_of(link), *figures)
        else:
            table.add_row(*ranks, "none: another rank sends them")
    return table


def layers_of(link: Link) -> str:
    """Formats the layers of all components together, such as `0-31, draft 0`."""
    parts = []
    for is_draft in (False, True):
        layers = sorted({one.layer for one in link.parts if one.draft is is_draft})
        if layers:
            parts.append(("draft " if is_draft else "") + format_spans(layers))
    return ", ".join(parts)


def heads_of(link: Link) -> str:
    """Formats the heads, such as `0-1`; by component where they differ."""
    known: dict[tuple[int, int] | None, list[str]] = {}
    for share in link.parts:
        known.setdefault(share.heads, []).append(share.component)
    if len(known) == 1:
        return _heads(next(iter(known)))
    return ", ".join(f"{names[0]} {_heads(heads)}" for heads, names in known.items())


def _heads(heads: tuple[int, int] | None) -> str:
    return "all" if heads is None else format_spans(list(range(*heads)))


def format_spans(numbers: list[int]) -> str:
    """Formats numbers, such as `0-3, 6`, or `3-47 by 4`."""
    step = numbers[1] - numbers[0] if len(numbers) > 2 else 1
    if step > 1 and numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}-{numbers[-1]} by {step}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _figures(summary: Summary) -> list[tuple[str, Text | str]]:
    some, sides = summary.totals, summary.pair.sides
    links = summary.links
    by_rank = {"prefill": {}, "decode": {}}
    for link in links:
        for side, busy in by_rank.items():
            rank = getattr(link, side)
            busy[rank] = busy.get(rank, 0) + link.bytes
    held = {side: summary.rank_bytes(side) for side in sides}
    return [
        ("stock", _outcome(summary.stock)),
        ("patched", _outcome(summary.patched)),
        *((f"{side} ranks", f"{sizes.tp * sizes.pp}") for side, sizes in sides.items()),
        *((f"KV bytes per token, {side} rank", f"{token:,}") for side, (token, _) in held.items()),
        *((f"state per request, {side} rank", size(slot)) for side, (_, slot) in held.items()),
        (f"pairs of ranks, {TOKENS} tokens", f"{some['links']:,}"),
        ("bytes", size(some["bytes"])),
        *(
            (f"most bytes of one {side} rank", size(max(busy.values(), default=0)))
            for side, busy in by_rank.items()
        ),
        ("copies, contiguous pages", f"{some['copies_at_least']:,}"),
        ("copies, scattered pages", f"{some['copies_at_most']:,}"),
        ("messages", f"{some['messages']:,}"),
    ]


def size(count: int) -> str:
    """Formats a number of bytes, such as `12.5 MiB`."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount >= 1024:
            amount, unit = amount / 1024, larger
    return f"{amount:,.1f} {unit}" if unit != "B" else f"{count} B"
