"""Sends a check's requests, gathers what decode ranks compared meanwhile, and judges."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from sglang_pd.verify.prompts import PromptGroup, prompt_groups, prompt_lengths
from sglang_pd.verify.servers import (
    Answer,
    Difference,
    FleetClient,
    PairStats,
    PrefillServer,
    RankReport,
)

REPORT_TIMEOUT_S = 15  # for decode ranks to report what they compared
LOGPROB_TOLERANCE = 0.1
VERIFICATION_FAILED = "KV verification failed"  # in the answer to a request that was stopped
NO_REPORT = RankReport("", "", 0, 0, {}, [], [], 0.0)


@dataclass
class DraftStats:
    """Statistics of a draft model over several answers, as servers report them."""

    tokens: int = 0
    rounds: int = 0

    def add(self, answer: Answer) -> None:
        """Adds an answer without its first token, which prefill computes without a draft model."""
        self.tokens += max(0, len(answer.ids) - 1)
        self.rounds += answer.rounds

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted tokens plus the target's own, 1 if none is accepted; None without a draft."""
        return self.tokens / self.rounds if self.rounds else None


@dataclass
class Verdict:
    """The results of a check.

    The draft models' statistics are of the same prompts in the fleet and in the reference. Prompts
    sent at once are left out: their cuts into chunks depend on chance, and at a chunk's end a draft
    model receives the target's own next token.
    """

    requests: int = 0  # two for each prompt
    lengths: list[int] = field(default_factory=list)  # of single prompts, in tokens
    failures: list[str] = field(default_factory=list)  # requests without an answer
    stopped: int = 0  # requests without an answer because their KV differs
    unequal: list[str] = field(default_factory=list)  # prompts whose two answers differ
    compared: int = 0  # requests whose KV the first rank of each decode server compared
    # By (prefill server, prefill rank, decode rank).
    pairs: dict[tuple[str, str, str], PairStats] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from each request until all had arrived
    comparing: float = 0.0  # seconds that all decode ranks took to compare
    from_reference: list[str] | None = None  # differing answers; None without a reference
    drafted: DraftStats = field(default_factory=DraftStats)
    reference_drafted: DraftStats = field(default_factory=DraftStats)

    @property
    def answered(self) -> int:
        return self.requests - len(self.failures) - self.stopped

    @property
    def passed(self) -> bool:
        """Whether all requests were answered, with KV that was compared and is equal.

        With a reference, its answers must be the same, too.
        """
        wrong = self.failures or self.stopped or self.mismatches or self.from_reference
        return not wrong and self.compared >= self.requests > 0


async def check(
    fleet: FleetClient,
    lengths: Iterable[int],
    requests: int,
    new_tokens: int,
    reference: str = "",
    on_progress: Callable[[str, int], None] = lambda name, count: None,
) -> Verdict:
    """Sends every prompt twice, and collects what the decode ranks report.

    lengths: of single prompts, in tokens. requests: number of prompts sent at once, at the end.
    reference: URL of a server to compare answers with, if any. on_progress: receives each prompt
    group's name and size. Raises Refusal if the servers do not verify or do not answer.
    """
    prefills = await fleet.prefill_servers()
    page_size = max(one.page_size for one in prefills)
    chunks = [one.chunk for one in prefills if one.chunk]
    longest = min(one.longest for one in prefills)
    tried = prompt_lengths(list(lengths), page_size, max(chunks, default=None), longest)
    before = await _rank_reports(fleet, prefills)
    verdict = Verdict(lengths=tried)
    if reference:
        verdict.from_reference = []
    for group in prompt_groups(tried, page_size, requests):
        on_progress(group.name, len(group.prompts))
        first, second = [await _send_group(group, fleet, new_tokens) for _ in range(2)]
        _record_answers(verdict, group, first, second)
        if reference:
            alone = FleetClient(fleet.client, reference)
            expected = await _send_group(group, alone, new_tokens)
            _compare_with_reference(verdict, group, first, expected)
        elif not group.at_once:
            for one in first:
                verdict.drafted.add(one)
    await _collect_reports(verdict, fleet, prefills, before)
    return verdict


async def _send_group(group: PromptGroup, fleet: FleetClient, new_tokens: int) -> list[Answer]:
    answers = [fleet.generate(prompt, new_tokens) for prompt in group.prompts]
    if group.at_once:
        return await asyncio.gather(*answers)
    return [await one for one in answers]


def _record_answers(
    verdict: Verdict, group: PromptGroup, first: list[Answer], second: list[Answer]
) -> None:
    for prompt, *answers in zip(group.prompts, first, second, strict=True):
        what = f"{len(prompt)} tokens, {group.name}"
        verdict.requests += len(answers)
        failed = [one.failure for one in answers if one.failure]
        for failure in failed:
            if VERIFICATION_FAILED in failure:  # the decode ranks' reports say where
                verdict.stopped += 1
            else:
                verdict.failures.append(f"{what}: {failure}")
        if not failed and answers[0].ids != answers[1].ids:
            verdict.unequal.append(f"{what}: {answers[0].ids} and {answers[1].ids}")


def _compare_with_reference(
    verdict: Verdict, group: PromptGroup, answers: list[Answer], expected: list[Answer]
) -> None:
    for prompt, got, want in zip(group.prompts, answers, expected, strict=True):
        what = f"{len(prompt)} tokens, {group.name}"
        if want.failure:
            verdict.from_reference.append(f"{what}: the reference did not answer: {want.failure}")
        elif got.failure:
            continue  # already in `failures`
        elif got.ids != want.ids:  # drafting is not comparable after other tokens
            verdict.from_reference.append(f"{what}: {got.ids}, the reference has {want.ids}")
        else:
            if not group.at_once:
                verdict.drafted.add(got)
                verdict.reference_drafted.add(want)
            far = max((abs(a - b) for a, b in zip(got.logprobs, want.logprobs)), default=0.0)
            if far > LOGPROB_TOLERANCE:
                off = f"a logprob differs from the reference's by {far:.3f}"
                verdict.from_reference.append(f"{what}: {off}")


async def _rank_reports(
    fleet: FleetClient, prefills: list[PrefillServer]
) -> dict[tuple[str, str], RankReport]:
    """Returns the reports by (prefill server's URL, decode rank's address)."""
    reports = [await fleet.reports(one) for one in prefills]
    return {
        (prefill.url, rank.at): rank
        for prefill, report in zip(prefills, reports, strict=True)
        for rank in report.ranks
    }


async def _collect_reports(
    verdict: Verdict, fleet: FleetClient, prefills: list[PrefillServer], before: dict
) -> None:
    """Adds what was compared since `before`; waits for all reports, up to REPORT_TIMEOUT_S."""
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while True:
        after = await _rank_reports(fleet, prefills)
        verdict.compared = sum(
            rank.requests - before.get(key, NO_REPORT).requests
            for key, rank in after.items()
            if "TP 0/" in rank.decode and "PP 0/" in rank.decode
        )
        if verdict.compared >= verdict.requests or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    for key, rank in after.items():
        old = before.get(key, NO_REPORT)
        verdict.mismatches += _differences(rank, old)
        verdict.seconds += _last(rank.seconds, rank.requests - old.requests)
        verdict.comparing += rank.comparing - old.comparing
        for prefill, count in rank.pairs.items():
            was = old.pairs.get(prefill, PairStats())
            counts = zip(msgspec.structs.astuple(count), msgspec.structs.astuple(was))
            added = PairStats(*(now - then for now, then in counts))
            verdict.pairs[key[0], prefill, f"{rank.decode} at {rank.at}"] = added


def _differences(rank: RankReport, old: RankReport) -> list[str]:
    """Returns what has differed since `old`: each buffer of each pair of ranks once.

    An older patch set reports each request instead.
    """
    if not rank.differing:
        return _last(rank.said, rank.failed - old.failed)
    said = []
    for what, known in rank.differing.items():
        count = known.requests - old.differing.get(what, Difference()).requests
        example = known.example and f", such as {known.example}"
        if count:
            said.append(f"{what}: requests: {count}{example}")
    return said


def _last(values: list, count: int) -> list:
    return values[max(0, len(values) - count) :]
