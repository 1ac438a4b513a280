"""Shows a verdict, as a table or as JSON."""

import statistics

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sglang_pd.verify.check import Verdict

MAX_SHOWN = 10  # entries of each list of problems
# Of the reference's tokens per step; on accelerators, sums differ with what else is computed.
MIN_DRAFT_RATIO = 0.95


def as_json(verdict: Verdict) -> dict:
    """Returns every figure; times are in seconds."""
    pairs = [
        {"server": server, "prefill": prefill, "decode": decode, **msgspec.structs.asdict(count)}
        for (server, prefill, decode), count in sorted(verdict.pairs.items())
    ]
    return {
        "right": verdict.passed,
        "requests": verdict.requests,
        "answered": verdict.answered,
        "compared": verdict.compared,
        "lengths": verdict.lengths,
        "pairs": pairs,
        "mismatches": verdict.mismatches,
        "failures": verdict.failures,
        "stopped": verdict.stopped,
        "unequal_answers": verdict.unequal,
        "from_reference": verdict.from_reference,
        "tokens_a_verify_step": {
            "fleet": verdict.drafted.tokens_per_round,
            "reference": verdict.reference_drafted.tokens_per_round,
        },
        "transfer_seconds": _duration_stats(verdict.seconds),
        "comparing_seconds": verdict.comparing,
    }


def show(verdict: Verdict, console: Console) -> None:
    """Prints a table of the pairs of ranks, and the problems below it."""
    figures = ("requests", "buffers", "MiB", "mismatches")
    columns = ("prefill rank", "decode rank", *(Column(one, justify="right") for one in figures))
    table = Table(*columns, title="KV that decode ranks compared with prefill's digests")
    for (_, prefill, decode), count in sorted(verdict.pairs.items()):
        wrong = Text(str(count.mismatches), style="red" if count.mismatches else "green")
        size = f"{count.bytes / 2**20:.1f}"
        table.add_row(prefill, decode, str(count.requests), str(count.parts), size, wrong)
    console.print(table)
    _print_list(console, "KV that differs", verdict.mismatches)
    if verdict.stopped:
        console.print(Text(f"{verdict.stopped} requests were stopped for that", style="red"))
    _print_list(console, "Requests without an answer", verdict.failures)
    _print_list(console, "Prompts whose two answers differ", verdict.unequal)
    _print_list(console, "Answers that differ from the reference's", verdict.from_reference or [])
    if spread := _duration_stats(verdict.seconds):
        console.print(
            f"transfers: median {spread['median'] * 1000:.0f} ms, longest "
            f"{spread['longest'] * 1000:.0f} ms; comparing took {verdict.comparing:.2f} s in total"
        )
    if drafts := _drafts(verdict):
        console.print(drafts)
    console.print(_summary_line(verdict))


def _drafts(verdict: Verdict) -> Text | None:
    """Compares how well draft models predict in fleet and reference; None without a draft model."""
    here, there = verdict.drafted.tokens_per_round, verdict.reference_drafted.tokens_per_round
    if here is None and there is None:
        return None
    if here is None:
        return Text("drafts: the reference has a draft model, the fleet does not")
    line = f"drafts: {here:.2f} tokens per verify step"
    if there is None:
        return Text(f"{line}; 1 means no accepted draft")
    if here >= MIN_DRAFT_RATIO * there:
        return Text(f"{line}, {there:.2f} in the reference")
    why = "does the draft's KV arrive? See docs/trouble.md, few drafts are accepted"
    return Text(f"{line}, {there:.2f} in the reference: {why}", style="yellow")


def _summary_line(verdict: Verdict) -> Text:
    sent = f"{verdict.requests} requests of {len(verdict.lengths)} lengths"
    counts = f"{verdict.answered} answered, {verdict.compared} compared"
    if verdict.passed:
        return Text(f"OK: {sent}, {counts}, all KV matches prefill", style="green")
    return Text(f"FAILED: {sent}, {counts}", style="bold red")


def _print_list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print(Text(f"{title} ({len(lines)}):", style="red"))
    for line in lines[:MAX_SHOWN]:
        console.print(Text(f"  {line}"))
    if len(lines) > MAX_SHOWN:
        console.print(f"  and {len(lines) - MAX_SHOWN} more")


def _duration_stats(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "longest": max(seconds)} if seconds else {}
