"""Shows a summary of a pair, as tables or as JSON."""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sglang_pd.plan.known_failures import LOGPROBS, RETRACTS, RIGHT, UNKNOWN
from sglang_pd.plan.links import PACKED, SLICED, TOKENS, Link
from sglang_pd.plan.pair import ServerPair
from sglang_pd.plan.summary import Summary
from sglang_pd.plan.verdict import Verdict

CONTENT = attrgetter("component", "draft", "heads")  # of a SentPart, without its layer
# What a side does with packed heads.
PACKING = {
    "decode": "prefill sends whole rows, and decode interleaves them",
    "prefill": "prefill packs those of each decode rank into whole rows",
}
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
        "kv_heads": {"sent": summary.kv_heads, "packed_by": summary.packed_by},
        "notes": summary.notes,
    }


def _side(summary: Summary, side: str) -> dict:
    sizes = summary.pair.sides[side]
    token, request = summary.rank_bytes(side)
    return {
        **msgspec.to_builtins(sizes),
        "attention_tp": sizes.attention_tp,
        "ranks": sizes.ranks,
        "stages": [[one.start, one.stop] for one in summary.pair.stages_of(side)],
        "bytes_a_token": token,
        "bytes_a_request": request,
    }


def _link(link: Link) -> dict:
    return {
        "prefill": link.prefill._asdict(),
        "decode": link.decode._asdict(),
        "sends": [
            {"component": name, "draft": is_draft, "heads": heads, "layers": [p.layer for p in run]}
            for (name, is_draft, heads), run in groupby(link.parts, CONTENT)
        ],
        "bytes": link.bytes,
        "copies_at_least": link.min_copies,
        "copies_at_most": link.max_copies,
        "copies_if_sliced": link.sliced_copies,
        "kv_heads": link.kv_heads,
        "messages": link.messages,
    }


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
    for (name, ours), (_, theirs) in zip(_figures(first), _figures(second), strict=True):
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
    """Describes a request's totals, and how KV heads go; empty if the pair is refused."""
    if not summary.links:
        return []
    some = summary.totals
    copies = f"{some['copies_at_most']:,} copies"
    if some["copies_at_least"] < some["copies_at_most"]:
        copies = f"{some['copies_at_least']:,} copies (contiguous pages) to {copies} (scattered)"
    pairs = f"{some['links']} pair{'s' * (some['links'] != 1)} of ranks"
    said = [
        f"A request of {TOKENS} tokens: {size(some['bytes'])} over {pairs}, "
        f"in {copies}; {some['messages']} messages."
    ]
    if summary.kv_heads == PACKED:
        said.append(
            f"KV heads go packed: {PACKING[summary.packed_by]}. Sliced (SGLANG_PD_PACKED=0), "
            f"they take {some['copies_if_sliced']:,} copies."
        )
    if summary.kv_heads == SLICED:
        said.append("KV heads go sliced: a copy for each token, layer and component.")
    return said


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=False)


def _table(*headings: str, right: Iterable[str] = ()) -> Table:
    columns = (
        Column(heading, justify="right" if heading in right else "left", overflow="fold")
        for heading in headings
    )
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _verdicts(summary: Summary) -> Table:
    table = _table("engine", "verdict", "why")
    for name, verdict in (("stock", summary.stock), ("patched", summary.patched)):
        events = {f"  {text}": verdict.on.get(event) for event, text in EVENT_TEXTS.items()}
        for label, one in {name: verdict, **events}.items():
            if one:
                record = f" ({one.record})" if one.record else ""
                table.add_row(label, _outcome(one), Text("; ".join(one.reasons) + record))
    return table


def _outcome(verdict: Verdict) -> Text:
    colours = {RIGHT: "green", UNKNOWN: "yellow"}
    return Text(verdict.outcome, colours.get(verdict.outcome, "red"))


def _servers(summary: Summary) -> Table:
    right = ("ranks", "groups", "bytes per token")
    table = _table("server", "ranks", "groups", "each", "layers", "heads", *right[2:], right=right)
    for name, sizes in summary.pair.sides.items():
        each = f"TP {sizes.attention_tp} PP {sizes.pp}"
        layers = "+".join(str(len(stage)) for stage in summary.pair.stages_of(name))
        heads = _heads_of_rank(summary.pair, sizes.attention_tp)
        token, request = summary.rank_bytes(name)
        held = f"{token:,}" + (f" and {size(request)} per request" if request else "")
        table.add_row(name, str(sizes.ranks), str(sizes.dp), each, layers, heads, held)
    return table


def _heads_of_rank(pair: ServerPair, tp: int) -> str:
    total, held = pair.model.kv_heads, pair.heads_of_rank(0, tp)
    if total is None:
        return "latent"
    if not held:
        return f"{total}, not divisible"
    return f"{len(held)} of {total}" + (", replicated" if tp > total else "")


def _links(summary: Summary) -> Table:
    right = ("MiB", "copies")
    table = _table("prefill rank", "decode rank", "layers", "heads", *right, right=right)
    for link in summary.links:
        ranks = (str(link.prefill), str(link.decode))
        if link.parts:
            copies = dict.fromkeys(f"{one:,}" for one in (link.min_copies, link.max_copies))
            figures = (f"{link.bytes / 2**20:,.1f}", " to ".join(copies))
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
    for part in link.parts:
        known.setdefault(part.heads, []).append(part.component)
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
    by_rank = {side: Counter() for side in sides}
    for link in summary.links:
        for side, sent in by_rank.items():
            sent[getattr(link, side)] += link.bytes
    held = {side: summary.rank_bytes(side) for side in sides}
    return [
        ("stock", _outcome(summary.stock)),
        ("patched", _outcome(summary.patched)),
        *((f"{side} ranks", f"{sizes.ranks}") for side, sizes in sides.items()),
        *((f"KV bytes per token, {side} rank", f"{token:,}") for side, (token, _) in held.items()),
        *((f"state per request, {side} rank", size(slot)) for side, (_, slot) in held.items()),
        (f"pairs of ranks, {TOKENS} tokens", f"{some['links']:,}"),
        ("bytes", size(some["bytes"])),
        *(
            (f"most bytes of one {side} rank", size(max(sent.values(), default=0)))
            for side, sent in by_rank.items()
        ),
        ("copies, contiguous pages", f"{some['copies_at_least']:,}"),
        ("copies, scattered pages", f"{some['copies_at_most']:,}"),
        ("copies if sliced", f"{some['copies_if_sliced']:,}"),
        ("KV heads go", summary.kv_heads),
        ("messages", f"{some['messages']:,}"),
    ]


def size(count: int) -> str:
    """Formats a number of bytes, such as `12.5 MiB`."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount >= 1024:
            amount, unit = amount / 1024, larger
    return f"{amount:,.1f} {unit}" if unit != "B" else f"{count} B"
