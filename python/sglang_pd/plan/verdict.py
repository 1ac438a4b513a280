"""Judges whether a pair works on the stock and on the patched engine, and if not, why."""

from dataclasses import dataclass, field
from functools import cache

from sglang_pd.patchset.patches import read_records
from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.known_failures import (
    LOGPROBS,
    NO_START,
    REFUSED,
    RETRACTS,
    RIGHT,
    STRAY,
    UNKNOWN,
    KnownFailure,
    first_match,
)
from sglang_pd.plan.links import refusal_reasons
from sglang_pd.plan.pair import ServerPair

EVENTS = (LOGPROBS, RETRACTS, STRAY)


@dataclass(frozen=True)
class Verdict:
    """What an engine does with a pair."""

    outcome: str = RIGHT  # one of the outcomes in `known_failures`
    reasons: tuple[str, ...] = ()  # why it is not `right`
    record: str = ""  # the patch record with the details, if there is one
    on: dict[str, "Verdict"] = field(default_factory=dict)  # by event, if one of `EVENTS` happens

    def when(self, *events: str) -> str:
        """Returns the outcome if these events happen."""
        return next((self.on[event].outcome for event in events if event in self.on), self.outcome)


def stock(pair: ServerPair) -> Verdict:
    """Judges the stock engine by the known failures of its release."""
    reasons = startup_errors(pair)
    if reasons:
        return Verdict(NO_START, tuple(reasons))
    verdict = _verdict(pair, first_match(pair))
    on = {event: _verdict(pair, failure) for event, failure in _on_events(pair).items()}
    return Verdict(verdict.outcome, verdict.reasons, verdict.record, on)


def patched(pair: ServerPair) -> Verdict:
    """Judges the patched engine by the core, which that engine itself uses."""
    reasons = startup_errors(pair)
    if reasons:
        return Verdict(NO_START, tuple(reasons))
    known = _verdict(pair, first_match(pair))
    if known.outcome == NO_START:
        return known
    reasons = refusal_reasons(pair)
    if reasons:
        return Verdict(REFUSED, tuple(reasons))
    if known.outcome == UNKNOWN:
        return known
    unpatched = records_without_edit(pair.release)
    on = {
        event: _verdict(pair, failure)
        for event, failure in _on_events(pair).items()
        if failure.record in unpatched
    }
    return Verdict(on=on)


def startup_errors(pair: ServerPair) -> list[str]:
    """Returns a reason for each TP size whose ranks cannot hold the model's KV heads."""
    held = [held for held in (pair.model.attention, pair.model.window_heads) if held]
    reasons = []
    for size in dict.fromkeys(pair.tp):
        for total in dict.fromkeys(getattr(one, "total", 1) for one in held):
            try:
                kv_layout.heads_of_rank(0, size, total)
            except kv_layout.LayoutError as error:
                reasons.append(str(error))
    return reasons


def _on_events(pair: ServerPair) -> dict[str, KnownFailure]:
    return {event: failure for event in EVENTS if (failure := first_match(pair, event))}


@cache
def records_without_edit(release: str) -> set[str]:
    """Returns the patches that this release needs and does not get."""
    states = {record.id: record.at(release) for record in read_records()}
    return {name for name, at in states.items() if at and at.state != "carried" and not at.symbols}


def _verdict(pair: ServerPair, failure: KnownFailure | None) -> Verdict:
    if failure is None:
        return Verdict()
    return Verdict(failure.outcome(pair), (failure.reason,), failure.record)
