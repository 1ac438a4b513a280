"""Describes a rank's KV buffers, pairs them with a peer's, and plans the copies between them.

The modules build on one another: `layout` (the description) and `pools` (which describes the
engine's pools), `heads` and `match`, `plan` (and `prepared`, for a transport that prepares all
pages in advance), `permutation` and `packed` (head slices as whole rows), `bounds`, which no copy
may leave, `infer` for peers that send no description, `wire` for the frame that carries one,
`aux_buffers` for a request's metadata, `convolutions` for Mamba 2's state, `peer` for a whole plan
in one call, `transfer_status` for the receiving side, and `digests` to verify the result. Nothing
here imports the engine or torch.
"""

from .aux_buffers import HIDDEN_STATES, AuxPlan, make_aux_plan, unsent_rows_message
from .bounds import (
    Bounds,
    announced_memory,
    described_aux,
    described_memory,
    max_slots,
    slot_error,
)
from .digests import (
    ByteRange,
    Digests,
    Part,
    RoomDigests,
    byte_ranges,
    decode_digests,
    describe_difference,
    differing_buffers,
    elided_parts,
    encode_digests,
    missing_parts,
    position_weights,
    sent_parts,
    summarize,
)
from .heads import (
    heads_of_rank,
    heads_to_send,
    pp_size_conflict,
    prefill_ranks_of,
    tp_size_conflict,
)
from .infer import StockRegistration, infer_layout, layout_from_counts
from .layout import OPAQUE, Buffer, Heads, LayoutError, RankLayout, is_split_by_heads
from .match import BufferPair, draft_mismatch, incompatibilities, match_buffers
from .packed import PackedPlan, PackingRound, make_packed_plan
from .peer import PeerPlan, Pointers, pair_layers, plan_for_peer
from .permutation import (
    Permutation,
    Unit,
    agreed_units,
    decode_units,
    encode_units,
    make_permutations,
    page_slots,
    split_unit,
    unpacked_reason,
)
from .plan import Copies, TransferPlan, make_plan
from .pools import (
    describe_pools,
    describe_unknown,
    has_separate_state,
    memory_kind,
    total_heads,
)
from .prepared import PreparedPlan, prepare
from .transfer_status import Notification, TransferStatus, format_notification, parse_notification
from .wire import (
    Sizes,
    decode_layout,
    encode_layout,
    encode_sizes,
    find_layout_frame,
    find_sizes,
    has_layout_frame,
    is_extension_frame,
)
