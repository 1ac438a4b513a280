"""Send the requests of a check, gather what decode ranks compared meanwhile, and judge."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import httpx

from sglang_pd.verify.prompts import PromptGroup, prompt_groups, prompt_lengths
from sglang_pd.verify.servers import (
    Answer,
    FleetClient,
    PairStats,
    PrefillServer,
    RankReport,
    answer,
    generate_body,
)

REPORT_TIMEOUT_S = 15  # in which decode ranks report what they have compared
LOGPROB_TOLERANCE = 0.1


@dataclass
class DraftStats:
    """What servers say of the drafts of some answers."""

    tokens: int = 0
    rounds: int = 0

    def add(self, answer: Answer) -> None:
        """The first token is prefill's, and no draft's."""
        self.tokens += max(0, len(answer.ids) - 1)
        self.rounds += answer.rounds

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted and the target's own, 1 where none is accepted; None without a draft model."""
        return self.tokens / self.rounds if self.rounds else None


@dataclass
class Verdict:
    """What a check has found.

    Attributes:
        requests: Those that were sent, each prompt's two among them.
        lengths: Of single prompts, tokens.
        failures: Requests without an answer.
        unequal: Prompts whose two answers differ.
        compared: Requests whose KV was compared, by the first rank of each decode server.
        pairs: By prefill server, prefill rank and decode rank.
        mismatches: What differed, in words.
        seconds: Of the transfers, from asking prefill until all had arrived.
        comparing: Seconds that the decode ranks took to compare, in all.
        from_reference: Prompts whose answer is not the reference's; None without one.
        drafted, reference_drafted: Of the same prompts, the fleet's drafts and the reference's.
            Those that are sent at once are left out: how they are cut into chunks is chance, and
            at the end of a chunk a draft is told what the target would have said there.
    """

    requests: int = 0
    lengths: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    compared: int = 0
    pairs: dict[tuple[str, str, str], PairStats] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    comparing: float = 0.0
    from_reference: list[str] | None = None
    drafted: DraftStats = field(default_factory=DraftStats)
    reference_drafted: DraftStats = field(default_factory=DraftStats)

    @property
    def answered(self) -> int:
        return self.requests - len(self.failures)

    @property
    def passed(self) -> bool:
        """Every request was answered, its KV compared, and found equal."""
        wrong = self.failures or self.mismatches or self.from_reference
        return not wrong and self.compared >= self.requests > 0


async def check(
    fleet: FleetClient,
    lengths: Iterable[int],
    requests: int,
    new_tokens: int,
    reference: str = "",
    on_progress: Callable[[str, int], None] = lambda name, count: None,
) -> Verdict:
    """Send everything twice, and see what the decode ranks say of it.

    Raises:
        Refusal: The servers do not verify, or cannot be asked.
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
        first, second = [await _send_group(group, fleet.generate, new_tokens) for _ in range(2)]
        _record_answers(verdict, group, first, second)
        if reference:
            await _compare_with_reference(
                verdict, group, first, fleet.client, reference, new_tokens
            )
        elif not group.at_once:
            for one in first:
                verdict.drafted.add(one)
    await _collect_reports(verdict, fleet, prefills, before)
    return verdict


async def _send_group(
    group: PromptGroup, generate: Callable[[tuple, int], Awaitable[Answer]], new_tokens: int
) -> list[Answer]:
    asking = [generate(prompt, new_tokens) for prompt in group.prompts]
    if group.at_once:
        return await asyncio.gather(*asking)
    return [await one for one in asking]


def _record_answers(
    verdict: Verdict, group: PromptGroup, first: list[Answer], second: list[Answer]
) -> None:
    for prompt, *answers in zip(group.prompts, first, second, strict=True):
        what = f"{len(prompt)} tokens, {group.name}"
        verdict.requests += len(answers)
        failed = [f"{what}: {one.failure}" for one in answers if one.failure]
        verdict.failures += failed
        if not failed and answers[0].ids != answers[1].ids:
            verdict.unequal.append(f"{what}: {answers[0].ids} and {answers[1].ids}")


async def _compare_with_reference(
    verdict: Verdict,
    group: PromptGroup,
    answers: list[Answer],
    client: httpx.AsyncClient,
    reference: str,
    new_tokens: int,
) -> None:
    async def generate(prompt, new_tokens):
        return await answer(client, reference, generate_body(prompt, new_tokens))

    expected = await _send_group(group, generate, new_tokens)
    for prompt, got, want in zip(group.prompts, answers, expected, strict=True):
        what = f"{len(prompt)} tokens, {group.name}"
        if want.failure:
            verdict.from_reference.append(f"{what}: the reference does not answer: {want.failure}")
        elif got.failure:
            continue  # it is among the failures
        elif got.ids != want.ids:  # other tokens, of which others are foreseen
            verdict.from_reference.append(f"{what}: {got.ids}, the reference has {want.ids}")
        else:
            if not group.at_once:
                verdict.drafted.add(got)
                verdict.reference_drafted.add(want)
            far = max((abs(a - b) for a, b in zip(got.logprobs, want.logprobs)), default=0.0)
            if far > LOGPROB_TOLERANCE:
                verdict.from_reference.append(f"{what}: a logprob is {far:.3f} off the reference's")


async def _rank_reports(
    fleet: FleetClient, prefills: list[PrefillServer]
) -> dict[tuple[str, str], RankReport]:
    """By prefill server and decode rank."""
    reports = [await fleet.reports(one) for one in prefills]
    return {
        (prefill.url, rank.at): rank
        for prefill, report in zip(prefills, reports, strict=True)
        for rank in report.ranks
    }


async def _collect_reports(
    verdict: Verdict, fleet: FleetClient, prefills: list[PrefillServer], before: dict
) -> None:
    """What was compared since `before`; waits until all of it is reported."""
    deadline = time.monotonic() + REPORT_TIMEOUT_S
    while True:
        after = await _rank_reports(fleet, prefills)
        verdict.compared = sum(
            rank.requests - _report_before(before, key).requests
            for key, rank in after.items()
            if "TP 0/" in rank.decode and "PP 0/" in rank.decode
        )
        if verdict.compared >= verdict.requests or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    for key, rank in after.items():
        old = _report_before(before, key)
        new = rank.requests - old.requests
        verdict.mismatches += rank.said[
            len(rank.said) - min(rank.failed - old.failed, len(rank.said)) :
        ]
        verdict.seconds += rank.seconds[max(0, len(rank.seconds) - new) :] if new else []
        verdict.comparing += rank.comparing - old.comparing
        for prefill, count in rank.pairs.items():
            was = old.pairs.get(prefill, PairStats())
            verdict.pairs[key[0], prefill, f"{rank.decode} at {rank.at}"] = PairStats(
                count.requests - was.requests,
                count.parts - was.parts,
                count.bytes - was.bytes,
                count.mismatches - was.mismatches,
            )


def _report_before(before: dict, key: tuple[str, str]) -> RankReport:
    return before.get(key) or RankReport("", "", 0, 0, {}, [], [], 0.0)
