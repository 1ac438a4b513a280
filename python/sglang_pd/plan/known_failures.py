"""Known failures of stock engines with a pair, by release, backend and sizes.

Each failure names its patch record (docs/patches.md), if any, which has its cause and fix. The
outcome is what serving showed, or the transport's tests if no server was tried, or else what the
release's code does. The first failure that applies counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_pd.plan import conditions as when
from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.pair import ServerPair

RIGHT, WRONG, HANGS, CRASHES = "right", "wrong", "hangs", "crashes"
FAILS, NO_START, REFUSED, UNKNOWN = "fails", "no start", "refused", "unknown"

# Events that may happen to a server of any size.
RETRACTS, STRAY, LOGPROBS = "decode retracts", "stray message", "logprobs"

Outcomes = dict[str, str]  # by backend


def by_backend(nixl: str = "", mooncake: str = "", ascend: str | None = None) -> Outcomes:
    """Returns {backend: outcome}.

    `ascend` is Mooncake's backend with another transfer engine: Mooncake's outcome is the default.
    """
    return {"nixl": nixl, "mooncake": mooncake, "ascend": mooncake if ascend is None else ascend}


def all_backends(outcome: str) -> Outcomes:
    return by_backend(outcome, outcome)


@dataclass(frozen=True)
class KnownFailure:
    """What a stock engine does with pairs to which the failure `applies`, and why."""

    record: str  # the patch record; empty if no patch concerns the failure
    reason: str
    applies: Callable[[ServerPair], bool]
    v0_5_9: Outcomes = field(default_factory=dict)  # in that release; empty if it does not fail
    v0_5_18: Outcomes = field(default_factory=dict)
    v0_5_23: Outcomes = field(default_factory=dict)
    event: str = ""  # that the failure needs

    @property
    def outcomes(self) -> dict[str, Outcomes]:
        """The outcomes by release, for each release that was examined."""
        return {"0.5.9": self.v0_5_9, "0.5.18": self.v0_5_18, "0.5.23": self.v0_5_23}

    def outcome(self, pair: ServerPair) -> str:
        """Returns the outcome for the pair's release and backend; empty if they do not fail.

        UNKNOWN for a release that was not examined.
        """
        return self.outcomes.get(pair.release, all_backends(UNKNOWN)).get(pair.backend, "")


def first_match(pair: ServerPair, event: str = "") -> KnownFailure | None:
    """Returns the first failure that applies to this pair, on an event or, by default, on none."""
    if pair.release not in NOT_EXAMINED.outcomes:
        return NOT_EXAMINED
    known = (one for one in KNOWN_FAILURES if one.event == event and one.outcome(pair))
    return next((one for one in known if one.applies(pair)), None)


NOT_EXAMINED = KnownFailure(
    "", "what stock servers of this release do was not examined", lambda pair: True
)
KNOWN_FAILURES = [
    KnownFailure(
        "",
        "this release does not support speculation with pipeline stages",
        lambda pair: any(side.draft > 0 and side.pp > 1 for side in pair.sides.values()),
        v0_5_9=all_backends(NO_START),
        v0_5_18=all_backends(NO_START),
    ),
    KnownFailure(
        "refuse-unfit-peers",
        "the decode server crashes if the page sizes differ",
        lambda pair: pair.prefill.page != pair.decode.page,
        v0_5_9=all_backends(CRASHES),
        v0_5_18=all_backends(CRASHES),
        v0_5_23=all_backends(CRASHES),
    ),
    KnownFailure(
        "refuse-unfit-peers",
        "the decode server crashes if its PP size is neither 1 nor prefill's",
        lambda pair: kv_layout.pp_size_conflict(*pair.pp) is not None,
        v0_5_9=all_backends(CRASHES),
        v0_5_18=all_backends(CRASHES),
        v0_5_23=all_backends(CRASHES),
    ),
    KnownFailure(
        "refuse-unfit-peers",
        "neither TP size divides the other: some rank never receives a request",
        lambda pair: kv_layout.tp_size_conflict(*pair.tp) is not None,
        v0_5_9=all_backends(HANGS),
        v0_5_18=all_backends(HANGS),
        v0_5_23=all_backends(HANGS),
    ),
    KnownFailure(
        "recurrent-state",
        "recurrent state between different PP sizes was not tested; use sglang-pd verify",
        lambda pair: pair.model.recurrent is not None and pair.pp_differs,
        v0_5_9=all_backends(UNKNOWN),
        v0_5_18=all_backends(UNKNOWN),
        v0_5_23=all_backends(UNKNOWN),
    ),
    KnownFailure(
        "recurrent-state",
        "recurrent state is not sent between different TP sizes, or is split in the wrong places",
        lambda pair: pair.model.recurrent is not None and pair.tp_differs,
        v0_5_9=by_backend(CRASHES, WRONG),
    ),
    KnownFailure(
        "recurrent-state",
        "the windows of Mamba 2's convolutions are split as if they were one",
        lambda pair: pair.splits_recurrent_state and not pair.model.recurrent.has_named_channels,
        v0_5_18=all_backends(WRONG),
        v0_5_23=all_backends(WRONG),
    ),
    KnownFailure(
        "kv-layout",
        "windows are not sent between TP sizes: prefill raises an error instead",
        lambda pair: pair.model.window > 0 and pair.tp_differs,
        v0_5_9=by_backend(CRASHES, HANGS),
        v0_5_18=all_backends(HANGS),
    ),
    KnownFailure(
        "window-stages",
        "two stages send the layer between them, but one of them has not computed it",
        lambda pair: pair.model.window > 0 and pair.pp_differs,
        v0_5_9=all_backends(WRONG),
    ),
    KnownFailure(
        "kv-layout",
        "layers of a stage are paired by position, but windows are layers of another kind",
        lambda pair: pair.model.window > 0 and pair.pp_differs,
        v0_5_18=by_backend("", WRONG),
        v0_5_23=by_backend("", WRONG),
    ),
    KnownFailure(
        "nixl-heads",
        "the prefill server crashes: V is sent with K's length, but the lengths differ",
        when.v_width_differs,
        v0_5_9=by_backend(CRASHES),
    ),
    KnownFailure(
        "draft-state",
        "decode has no index keys for prefill's draft: prefill's thread or scheduler crashes",
        lambda pair: when.sends_index_keys(pair) and when.drafts_on(pair, True, False),
        v0_5_9=by_backend(CRASHES, HANGS),
    ),
    KnownFailure(
        "kv-layout",
        "decode has no buffers for prefill's draft",
        lambda pair: when.drafts_on(pair, True, False),
        v0_5_9=by_backend(CRASHES, HANGS),
        v0_5_18=all_backends(HANGS),
        # Mooncake refuses writes outside decode's buffers, MemFabric does not.
        v0_5_23=by_backend(HANGS, FAILS, WRONG),
    ),
    KnownFailure(
        "kv-layout",
        "decode has no buffers for the last layers of prefill's draft",
        lambda pair: when.drafts_on(pair, True, True) and pair.prefill.draft > pair.decode.draft,
        v0_5_18=all_backends(HANGS),
    ),
    KnownFailure(
        "nixl-senders",
        "prefill's TP ranks share one sender number, and decode waits for more",
        lambda pair: not pair.model.is_mla and pair.tp[0] > pair.tp[1],
        v0_5_9=by_backend(HANGS),
    ),
    KnownFailure(
        "nixl-heads",
        "the prefill server crashes: decode has more ranks than KV heads",
        when.replicates_on_decode,
        v0_5_9=by_backend(CRASHES),
    ),
    KnownFailure(
        "mooncake-plan",
        "decode has more ranks than KV heads: prefill's transfer thread crashes",
        when.replicates_on_decode,
        v0_5_9=by_backend("", HANGS),
    ),
    KnownFailure(
        "mooncake-plan",
        "prefill has more ranks than KV heads, and each rank counts as a head",
        when.replicates_on_prefill,
        v0_5_9=by_backend("", WRONG),
    ),
    KnownFailure(
        "npu-fia",
        "with ASCEND_USE_FIA a token's size is used as a page's",
        lambda pair: pair.fia and pair.prefill.page > 1,
        v0_5_9=by_backend(ascend=WRONG),
    ),
    KnownFailure(
        "npu-mla-pp",
        "a stage's n-th buffer is written to decode's n-th, which belongs to another layer",
        lambda pair: pair.pp_differs and pair.model.is_mla,
        v0_5_9=by_backend(ascend=WRONG),
    ),
    KnownFailure(
        "kv-layout",
        "MLA with prefill stages: the thread that reads registrations crashes",
        lambda pair: pair.pp_differs and pair.model.is_mla,
        v0_5_18=by_backend(HANGS),
    ),
    KnownFailure(
        "mha-pp",
        "GQA with prefill stages: the thread that reads registrations crashes",
        lambda pair: pair.pp_differs and not pair.model.is_mla and not pair.tp_differs,
        v0_5_18=by_backend(HANGS),
        v0_5_23=by_backend(HANGS),
    ),
    KnownFailure(
        "nixl-heads",
        "prefill has more ranks than KV heads, and decode more than prefill",
        lambda pair: when.replicates_on_decode(pair) and pair.tp[0] > pair.model.attention.total,
        v0_5_18=by_backend(HANGS),
        v0_5_23=by_backend(HANGS),
    ),
    KnownFailure(
        "kv-layout",
        "between different TP sizes V is sent with K's length, but the lengths differ",
        lambda pair: when.v_width_differs(pair) and pair.tp_differs,
        v0_5_9=by_backend("", WRONG),
        v0_5_18=by_backend(HANGS, WRONG),
        v0_5_23=by_backend(HANGS, WRONG),
    ),
    KnownFailure(
        "mha-pp",
        "the position of decode's first V buffer is guessed from both sides' buffer counts",
        when.misplaces_v,
        v0_5_9=all_backends(WRONG),
        v0_5_18=all_backends(WRONG),
        v0_5_23=all_backends(WRONG),
    ),
    KnownFailure(
        "kv-layout",
        "both sides have the same number of stages, but with different layers",
        lambda pair: not pair.pp_differs and pair.stages[0] != pair.stages[1],
        v0_5_9=all_backends(WRONG),
        v0_5_18=by_backend(HANGS, WRONG),
        v0_5_23=all_backends(WRONG),
    ),
    KnownFailure(
        "kv-layout",
        "drafts of unequal length are paired by position",
        when.unequal_drafts,
        v0_5_9=all_backends(WRONG),
        v0_5_18=all_backends(WRONG),
        v0_5_23=all_backends(WRONG),
    ),
    KnownFailure(
        "draft-state",
        "the draft's index keys are not written on decode, so that few drafts are accepted",
        lambda pair: when.sends_index_keys(pair) and when.drafts_on(pair, True, True),
        v0_5_9=all_backends(WRONG),
    ),
    KnownFailure(
        "npu-cpu-copy",
        "KV that is copied back from the host is another token's",
        lambda pair: pair.fia,
        v0_5_9=by_backend(ascend=WRONG),
        event=RETRACTS,
    ),
    KnownFailure(
        "npu-cpu-copy",
        "the decode server crashes: NPU pools cannot be copied to the host",
        lambda pair: True,
        v0_5_9=by_backend(ascend=CRASHES),
        event=RETRACTS,
    ),
    KnownFailure(
        "npu-cpu-copy",
        "V is copied to the host with K's width",
        when.v_width_differs,
        v0_5_18=by_backend(ascend=WRONG),
        v0_5_23=by_backend(ascend=WRONG),
        event=RETRACTS,
    ),
    KnownFailure(
        "messages",
        "a prefill rank's message thread crashes",
        lambda pair: True,
        v0_5_9=all_backends(HANGS),
        v0_5_18=all_backends(HANGS),
        v0_5_23=all_backends(HANGS),
        event=STRAY,
    ),
    KnownFailure(
        "decode-logprobs",
        "the decode server crashes: its last stage has no logprobs at first",
        lambda pair: pair.decode.pp > 1,
        v0_5_9=all_backends(CRASHES),
        event=LOGPROBS,
    ),
]
