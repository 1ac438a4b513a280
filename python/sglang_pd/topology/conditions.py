"""What is asked of a pair to tell whether a stock engine can serve it."""

from sglang_pd.topology.core import kv_layout
from sglang_pd.topology.hybrids import FULL
from sglang_pd.topology.pair import Pair


def gqa(pair: Pair) -> bool:
    return not pair.model.is_mla


def tp_differs(pair: Pair) -> bool:
    return pair.tp[0] != pair.tp[1]


def tp_conflicts(pair: Pair) -> bool:
    return kv_layout.tp_size_conflict(*pair.tp) is not None


def pp_differs(pair: Pair) -> bool:
    return pair.pp[0] != pair.pp[1]


def pp_conflicts(pair: Pair) -> bool:
    return pair.decode.pp not in (1, pair.prefill.pp)


def split_otherwise(pair: Pair) -> bool:
    """As many stages on both sides, and other layers in them."""
    return not pp_differs(pair) and pair.stages[0] != pair.stages[1]


def page_differs(pair: Pair) -> bool:
    return pair.prefill.page != pair.decode.page


def replicates_on_decode(pair: Pair) -> bool:
    return gqa(pair) and pair.tp[1] > max(pair.tp[0], pair.model.attention.total)


def replicates_on_prefill(pair: Pair) -> bool:
    return gqa(pair) and pair.tp[0] > max(pair.tp[1], pair.model.attention.total)


def replicates_on_both(pair: Pair) -> bool:
    """More on decode than on prefill."""
    return replicates_on_decode(pair) and pair.tp[0] > pair.model.attention.total


def v_is_not_k(pair: Pair) -> bool:
    """In width."""
    return gqa(pair) and pair.model.attention.k != pair.model.attention.v


def keeps_windows(pair: Pair) -> bool:
    return pair.model.window > 0


def recurrent(pair: Pair) -> bool:
    return pair.model.recurrent is not None


def sends_index_keys(pair: Pair) -> bool:
    """As state; on an NPU they are KV."""
    return pair.model.has_index and pair.backend != "ascend"


def drafts_on(pair: Pair, prefill: bool, decode: bool) -> bool:
    return (pair.prefill.draft > 0, pair.decode.draft > 0) == (prefill, decode)


def unequal_drafts(pair: Pair) -> bool:
    """Of models that keep more than one buffer a layer."""
    several = gqa(pair) or pair.backend == "ascend"
    return several and drafts_on(pair, True, True) and pair.prefill.draft != pair.decode.draft


def misses_v(pair: Pair) -> bool:
    """Where decode's V begins is guessed from how many pointers either side has, and is not there.

    Not asked by NIXL's plans of 0.5.23, which refuse what they cannot pair by position.
    """
    if not gqa(pair) or (pair.backend, pair.release) == ("nixl", "0.5.23"):
        return False
    for at, stage in enumerate(pair.stages[0]):
        is_last = at == pair.prefill.pp - 1
        ours = len(pair.model.of_kind(FULL, stage)) + pair.prefill.draft * is_last
        there = stage if pair.decode.pp > 1 else range(pair.model.layers)
        target = len(pair.model.of_kind(FULL, there))
        theirs = target + pair.decode.draft * (is_last or pair.decode.pp == 1)
        if not ours or ours == theirs:
            continue
        has_guessed_draft = ours < theirs and theirs % ours > 0
        guess = ours * (theirs // ours) if has_guessed_draft else theirs
        if guess != target or (is_last and pair.prefill.draft):
            return True
    return False
