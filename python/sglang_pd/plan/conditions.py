"""Conditions on a pair that decide whether a stock engine can serve it."""

from sglang_pd.plan.hybrids import FULL
from sglang_pd.plan.pair import ServerPair


def replicates_on_decode(pair: ServerPair) -> bool:
    return not pair.model.is_mla and pair.tp[1] > max(pair.tp[0], pair.model.attention.total)


def replicates_on_prefill(pair: ServerPair) -> bool:
    return not pair.model.is_mla and pair.tp[0] > max(pair.tp[1], pair.model.attention.total)


def v_width_differs(pair: ServerPair) -> bool:
    """Whether a V head is wider or narrower than a K head."""
    return not pair.model.is_mla and pair.model.attention.k != pair.model.attention.v


def sends_index_keys(pair: ServerPair) -> bool:
    """Whether index keys are sent as state; on an NPU they are KV."""
    return pair.model.has_index and pair.backend != "ascend"


def drafts_on(pair: ServerPair, prefill: bool, decode: bool) -> bool:
    return (pair.prefill.draft > 0, pair.decode.draft > 0) == (prefill, decode)


def unequal_drafts(pair: ServerPair) -> bool:
    """Whether drafts differ in length, for models that keep more than one buffer per layer."""
    several = not pair.model.is_mla or pair.backend == "ascend"
    return several and drafts_on(pair, True, True) and pair.prefill.draft != pair.decode.draft


def misplaces_v(pair: ServerPair) -> bool:
    """Whether the engine guesses wrongly, from both sides' pointer counts, where decode's V begins.

    NIXL's plans of later releases guess only between TP sizes: at equal ones they refuse what they
    cannot pair by position.
    """
    guesses = pair.release == "0.5.9" or (pair.tp_differs and pair.decode.pp == 1)
    is_refused = pair.backend == "nixl" and not guesses
    if pair.model.is_mla or is_refused:
        return False
    for at, stage in enumerate(pair.stages[0]):
        is_last = at == pair.prefill.pp - 1
        ours = len(pair.model.layers_of_kind(FULL, stage)) + pair.prefill.draft * is_last
        there = stage if pair.decode.pp > 1 else range(pair.model.layers)
        target = len(pair.model.layers_of_kind(FULL, there))
        theirs = target + pair.decode.draft * (is_last or pair.decode.pp == 1)
        if not ours or ours == theirs:
            continue
        has_guessed_draft = ours < theirs and theirs % ours > 0
        guess = ours * (theirs // ours) if has_guessed_draft else theirs
        if guess != target or (is_last and pair.prefill.draft):
            return True
    return False
