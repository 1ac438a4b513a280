"""What a rank's KV buffers hold, which of a peer's buffers hold the same, and the copies between.

The order of thought is the order of the modules: `describe` (and `pools`, which describes the
engine's own), `heads` and `match`, `plan` (and `prepared`, for a transport that is told of all
pages beforehand), `bounds`, which no copy may leave, with `infer` for peers that describe nothing,
`wire` for the frame in which a description travels, `aux_rows` for a request's metadata, `peer` for
all of it in one call, `transfer_status` for the receiving end, and `digests` to prove all of it.
Nothing here imports the engine or torch.
"""

from .aux_rows import HIDDEN_STATES, AuxPlan, make_aux_plan, unsent_rows
from .bounds import (
    Bounds,
    described_memory,
    described_rows,
    most_slots,
    told_memory,
    why_no_slots,
)
from .describe import OPAQUE, Buffer, Heads, LayoutError, RankLayout
from .digests import (
    Digests,
    Part,
    RoomDigests,
    Slice,
    decode_digests,
    difference,
    elided_parts,
    encode_digests,
    sent_parts,
    slices_of,
    sum_up,
    unsent,
    weights,
)
from .heads import connected_prefill_ranks, heads_of_rank, heads_to_send, tp_size_conflict
from .infer import PeerFacts, counted_layout, infer_layout
from .match import Pair, match_buffers, one_sided_draft, refusals
from .peer import PeerPlan, Pointers, pair_layers, plan_for_peer
from .plan import Copies, TransferPlan, make_plan
from .pools import (
    describe_pools,
    describe_unknown,
    keeps_own_state,
    memory_kind,
    total_heads,
)
from .prepared import PreparedPlan, prepare
from .transfer_status import Notification, TransferStatus, format_notification, parse_notification
from .wire import (
    Sizes,
    bears_layout,
    decode_layout,
    encode_layout,
    encode_sizes,
    is_ours,
    layout_frame,
    told_sizes,
)

__all__ = [
    "HIDDEN_STATES",
    "OPAQUE",
    "TransferStatus",
    "AuxPlan",
    "Bounds",
    "Buffer",
    "Copies",
    "Digests",
    "Heads",
    "LayoutError",
    "Notification",
    "Pair",
    "Part",
    "PeerFacts",
    "PeerPlan",
    "PreparedPlan",
    "Pointers",
    "RankLayout",
    "RoomDigests",
    "Sizes",
    "Slice",
    "TransferPlan",
    "bears_layout",
    "connected_prefill_ranks",
    "counted_layout",
    "decode_digests",
    "decode_layout",
    "describe_pools",
    "describe_unknown",
    "described_memory",
    "described_rows",
    "difference",
    "elided_parts",
    "encode_digests",
    "encode_layout",
    "encode_sizes",
    "format_notification",
    "heads_of_rank",
    "infer_layout",
    "is_ours",
    "keeps_own_state",
    "layout_frame",
    "make_aux_plan",
    "make_plan",
    "match_buffers",
    "memory_kind",
    "one_sided_draft",
    "most_slots",
    "pair_layers",
    "parse_notification",
    "plan_for_peer",
    "prepare",
    "refusals",
    "heads_to_send",
    "sent_parts",
    "slices_of",
    "sum_up",
    "told_memory",
    "told_sizes",
    "total_heads",
    "tp_size_conflict",
    "unsent",
    "unsent_rows",
    "weights",
    "why_no_slots",
]
