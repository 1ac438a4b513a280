"""What stock engines are known to do with a pair: by release, backend and sizes.

Each limit is of a patch record (docs/patches.md), which has cause and cure; the outcome is what
serving showed, or the transport's tests where no server was tried. The first that holds is met.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_pd.topology import conditions as when
from sglang_pd.topology.pair import Pair

RIGHT, WRONG, HANGS, DIES = "right", "wrong", "hangs", "dies"
FAILS, NO_START, REFUSED, UNKNOWN = "fails", "no start", "refused", "unknown"

# What a server meets, beyond its sizes.
RETRACTS, STRAY, LOGPROBS = "decode retracts", "stray message", "logprobs"

Outcomes = dict[str, str]  # by backend


def over(nixl: str = "", mooncake: str = "", ascend: str | None = None) -> Outcomes:
    """Ascend's is Mooncake's with another engine: the same, where nothing else is said."""
    return {"nixl": nixl, "mooncake": mooncake, "ascend": mooncake if ascend is None else ascend}


def everywhere(outcome: str) -> Outcomes:
    return over(outcome, outcome)


@dataclass(frozen=True)
class Limit:
    """What a stock engine does where it `holds`, and why.

    Attributes:
        record: The patch's, empty for what no patch is about.
        first, later: Outcomes of 0.5.9 and of 0.5.23, empty where it is no limit.
        event: Only where that happens.
    """

    record: str
    why: str
    holds: Callable[[Pair], bool]
    first: Outcomes = field(default_factory=dict)
    later: Outcomes = field(default_factory=dict)
    event: str = ""

    def outcome(self, pair: Pair) -> str:
        """Empty where this is no limit of the pair's release and backend."""
        of_release = {"0.5.9": self.first, "0.5.23": self.later}.get(pair.release, {})
        return of_release.get(pair.backend, "")


def met(pair: Pair, event: str = "") -> Limit | None:
    """The first limit that holds for this pair: of an event, or of none."""
    known = (limit for limit in LIMITS if limit.event == event and limit.outcome(pair))
    return next((limit for limit in known if limit.holds(pair)), None)


LIMITS = [
    Limit(
        "",
        "this release does not speculate in pipeline stages",
        lambda pair: pair.prefill.draft > 0 and pair.prefill.pp > 1,
        first=everywhere(NO_START),
    ),
    Limit(
        "refuse-unfit-peers",
        "the decode server ends where the page sizes differ",
        when.page_differs,
        first=everywhere(DIES),
        later=everywhere(DIES),
    ),
    Limit(
        "refuse-unfit-peers",
        "the decode server ends where its PP size is neither 1 nor prefill's",
        when.pp_conflicts,
        first=everywhere(DIES),
        later=everywhere(DIES),
    ),
    Limit(
        "refuse-unfit-peers",
        "with TP sizes neither of which divides the other some rank is never asked",
        when.tp_conflicts,
        first=everywhere(HANGS),
        later=everywhere(HANGS),
    ),
    Limit(
        "recurrent-state",
        "recurrent state between PP sizes was not tried; sglang-pd verify does",
        lambda pair: when.recurrent(pair) and when.pp_differs(pair),
        first=everywhere(UNKNOWN),
        later=everywhere(UNKNOWN),
    ),
    Limit(
        "recurrent-state",
        "recurrent state is not sent between TP sizes, or cut in the wrong places",
        lambda pair: when.recurrent(pair) and when.tp_differs(pair),
        first=over(DIES, WRONG),
    ),
    Limit(
        "recurrent-state",
        "the windows of Mamba 2's convolutions are cut as if they were one",
        lambda pair: pair.cuts_state and not pair.model.recurrent.is_named,
        later=everywhere(WRONG),
    ),
    Limit(
        "kv-layout",
        "windows are not sent between TP sizes: prefill's scheduler or transfer thread ends",
        lambda pair: when.keeps_windows(pair) and when.tp_differs(pair),
        first=over(DIES, HANGS),
    ),
    Limit(
        "window-stages",
        "two stages send the layer between them, and one has never computed it",
        lambda pair: when.keeps_windows(pair) and when.pp_differs(pair),
        first=everywhere(WRONG),
    ),
    Limit(
        "kv-layout",
        "the layers of a stage are taken by position, and windows are layers of another kind",
        lambda pair: when.keeps_windows(pair) and when.pp_differs(pair),
        later=over("", WRONG),
    ),
    Limit(
        "nixl-heads",
        "the prefill server ends: V is sent in K's length, and they differ",
        when.v_is_not_k,
        first=over(DIES),
    ),
    Limit(
        "draft-state",
        "decode has no index keys for prefill's draft: prefill's thread or scheduler ends",
        lambda pair: when.sends_index_keys(pair) and when.drafts_on(pair, True, False),
        first=over(DIES, HANGS),
    ),
    Limit(
        "kv-layout",
        "decode has no buffers for prefill's draft",
        lambda pair: when.drafts_on(pair, True, False),
        first=over(DIES, HANGS),
        # Mooncake refuses what it writes beside decode's buffers, MemFabric does not.
        later=over(HANGS, FAILS, WRONG),
    ),
    Limit(
        "nixl-senders",
        "prefill's TP ranks send under one number, and decode waits for more",
        lambda pair: when.gqa(pair) and pair.tp[0] > pair.tp[1],
        first=over(HANGS),
    ),
    Limit(
        "nixl-heads",
        "the prefill server ends: decode has more ranks than there are KV heads",
        when.replicates_on_decode,
        first=over(DIES),
    ),
    Limit(
        "mooncake-plan",
        "decode has more ranks than there are KV heads: prefill's transfer thread ends",
        when.replicates_on_decode,
        first=over("", HANGS),
    ),
    Limit(
        "mooncake-plan",
        "prefill has more ranks than there are KV heads, and each rank counts as a head",
        when.replicates_on_prefill,
        first=over("", WRONG),
    ),
    Limit(
        "npu-fia",
        "with ASCEND_USE_FIA the bytes of a token are taken for those of a page",
        lambda pair: pair.fia and pair.prefill.page > 1,
        first=over(ascend=WRONG),
    ),
    Limit(
        "npu-mla-pp",
        "the n-th buffer of a stage is written to decode's n-th, which is another layer's",
        lambda pair: when.pp_differs(pair) and not when.gqa(pair),
        first=over(ascend=WRONG),
    ),
    Limit(
        "mha-pp",
        "GQA in prefill stages: the thread that reads registrations ends",
        lambda pair: when.pp_differs(pair) and when.gqa(pair) and not when.tp_differs(pair),
        later=over(HANGS),
    ),
    Limit(
        "mha-pp",
        "GQA in prefill stages: layers are paired by position where heads are cut",
        lambda pair: when.pp_differs(pair) and when.gqa(pair) and when.tp_differs(pair),
        later=over(WRONG),
    ),
    Limit(
        "nixl-heads",
        "prefill has more ranks than there are KV heads, and decode more than prefill",
        when.replicates_on_both,
        later=over(HANGS),
    ),
    Limit(
        "kv-layout",
        "between TP sizes V is sent in K's length, and they differ",
        lambda pair: when.v_is_not_k(pair) and when.tp_differs(pair),
        first=over("", WRONG),
        later=over(HANGS, WRONG),
    ),
    Limit(
        "mha-pp",
        "where decode's V begins is guessed from how many buffers both sides have",
        when.misses_v,
        first=everywhere(WRONG),
        later=everywhere(WRONG),
    ),
    Limit(
        "kv-layout",
        "both sides have as many stages, with other layers in them",
        when.split_otherwise,
        first=everywhere(WRONG),
        later=everywhere(WRONG),
    ),
    Limit(
        "kv-layout",
        "drafts of unequal length are paired by position",
        when.unequal_drafts,
        first=everywhere(WRONG),
        later=everywhere(WRONG),
    ),
    Limit(
        "draft-state",
        "the draft's index keys on decode stay unwritten, so that it guesses badly",
        lambda pair: when.sends_index_keys(pair) and when.drafts_on(pair, True, True),
        first=everywhere(WRONG),
    ),
    Limit(
        "npu-cpu-copy",
        "KV that comes back from the host is another token's",
        lambda pair: pair.fia,
        first=over(ascend=WRONG),
        event=RETRACTS,
    ),
    Limit(
        "npu-cpu-copy",
        "the decode server ends: NPU pools cannot be copied to the host",
        lambda pair: True,
        first=over(ascend=DIES),
        event=RETRACTS,
    ),
    Limit(
        "npu-cpu-copy",
        "V is copied to the host as wide as K",
        when.v_is_not_k,
        later=over(ascend=WRONG),
        event=RETRACTS,
    ),
    Limit(
        "messages",
        "the thread of a prefill rank that reads messages ends",
        lambda pair: True,
        first=everywhere(HANGS),
        later=everywhere(HANGS),
        event=STRAY,
    ),
    Limit(
        "decode-logprobs",
        "the decode server ends: its last stage has no logprobs at first",
        lambda pair: pair.decode.pp > 1,
        first=everywhere(DIES),
        event=LOGPROBS,
    ),
]
