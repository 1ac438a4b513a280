"""Describes this rank's buffers as `KVArgs` registers them, from its actual pools."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.kv_layout import (
    HIDDEN_STATES,
    Buffer,
    LayoutError,
    RankLayout,
    describe_pools,
    memory_kind,
    total_heads,
)
from sglang.srt.disaggregation.pd.file_guard import check_engine_files
from sglang.srt.disaggregation.pd.packed_mode import is_packed_mode, read_packing_bytes
from sglang.srt.disaggregation.pd.peer_silence import read_silent_seconds
from sglang.srt.disaggregation.pd.pool_views import set_views
from sglang.srt.disaggregation.pd.server_names import own_server_name
from sglang.srt.disaggregation.pd.verify import make_verifier
from sglang.srt.disaggregation.pd.verify_exchange import BACKENDS, require_verifiable
from sglang.srt.disaggregation.pd.verify_mode import verify_mode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache

logger = logging.getLogger(__name__)

# Kinds of state that are sent by plan, if a model has only that kind.
STATE_BY_PLAN = (StateType.SWA, StateType.DSA)

_scheduler: Optional[Scheduler] = None


@contextlib.contextmanager
def scheduler_context(scheduler: Scheduler) -> Iterator[None]:
    """Provides the scheduler, which knows the model, while its pools are registered."""
    global _scheduler
    _scheduler = scheduler
    try:
        yield
    finally:
        _scheduler = None


def set_local_layout(
    kv_args: KVArgs,
    token_to_kv_pool: KVCache,
    draft_token_to_kv_pool: Optional[KVCache],
    total_layers: int,
) -> None:
    """Sets `kv_args.layout`, which describes each buffer in `kv_args`, and `kv_args.memory`.

    The layout is None if `kv_layout` does not support the pools, or how they are sharded; the
    engine then sends everything. With `SGLANG_PD_VERIFY`, sets `kv_args.verifier`, too.

    Args:
        total_layers: Layers of the whole target model.

    Raises:
        ValueError: KV is to be compared, but cannot be; or a variable of the patch set is wrong.
    """
    check_engine_files()
    read_silent_seconds()
    is_packed_mode()
    read_packing_bytes()
    kv_args.layout = kv_args.views = None
    kv_args.memory = "VRAM"
    pools = (token_to_kv_pool, draft_token_to_kv_pool)
    try:
        kv_args.memory = memory_kind(token_to_kv_pool)
        why = _unsupported_features(kv_args)
        if not why:
            kv_args.layout = _layout(kv_args, *pools, total_layers)
            set_views(kv_args, pools, _sends_whole_rows())
    except (AttributeError, LayoutError) as error:
        why = str(error)
    except Exception:  # for future pools, which the engine will support
        why = "its buffers cannot be described"
        logger.warning(f"{type(token_to_kv_pool).__name__}: {why}", exc_info=True)
    if why:
        kv_args.layout = kv_args.views = None
        logger.info(
            f"Unsupported KV layout of {type(token_to_kv_pool).__name__}: {why}. "
            "Transfers use the engine's own code."
        )
    if verify_mode():
        require_verifiable(kv_args.layout, why)
        kv_args.verifier = make_verifier(kv_args, pools)


def set_up_state(
    engine: Callable[..., None],
    kv_args: KVArgs,
    token_to_kv_pool: KVCache,
    draft_token_to_kv_pool: Optional[KVCache] = None,
    total_kv_layers: Optional[int] = None,
    **more: Any,
) -> None:
    """Lists state buffers in `kv_args`, after KV. Extends the engine's: describes all buffers.

    Args:
        engine: The engine's function, which takes the other parameters.
        total_kv_layers: Layers of the whole target model.
    """
    pools = (token_to_kv_pool, draft_token_to_kv_pool)
    engine(kv_args, *pools, total_kv_layers, **more)
    set_local_layout(kv_args, *pools, total_kv_layers)


def _sends_whole_rows() -> bool:
    """Whether the backend can name chunks to interleave, and the engine uses no staging buffers."""
    backend = get_disagg().disaggregation_transfer_backend
    return backend in BACKENDS and not envs.SGLANG_DISAGG_STAGING_BUFFER.get()


def _unsupported_features(kv_args: KVArgs) -> str:
    """Returns why this rank's buffers are not described, other than for their pools."""
    parallel = get_parallel()
    reasons = {
        "pools that are registered without their scheduler": _scheduler is None,
        "hybrid pools whose layers the engine numbers": kv_args.kv_layer_ids,
        "sharded pages": getattr(parallel, "enable_kv_cache_sharding", False),
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "unified memory": get_memory().enable_unified_memory,
        "compressed MLA": getattr(kv_args, "mla_compression_ratios", None) is not None,
        "HiSparse": getattr(_scheduler, "enable_hisparse", False),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _layout(
    args: KVArgs, target: KVCache, draft: Optional[KVCache], total_layers: int
) -> RankLayout:
    parallel = get_parallel()
    tp = (parallel.attn_tp_rank, parallel.attn_tp_size)
    if getattr(args, "num_draft_entries", 1) == 0:  # 0.5.18 passes no pool then
        draft = None
    heads = (
        total_heads(_scheduler.model_config, target, False),
        None if draft is None else _draft_kv_heads(_scheduler),
    )
    kv = describe_pools(target, draft, args.kv_item_lens, args.kv_data_lens, False, tp, *heads)
    heads = (total_heads(_scheduler.model_config, target, True), heads[1])
    return RankLayout(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=args.pp_rank,
        pp_size=parallel.pp_size,
        page_size=args.page_size,
        dtype=args.kv_cache_dtype_str,
        memory=args.memory,
        total_layers=total_layers,
        kv=kv,
        state=_state(args, target, draft, tp, heads),
        aux=_aux_widths(args),
        aux_slots=min(map(int.__floordiv__, args.aux_data_lens, args.aux_item_lens)),
        verifies=bool(verify_mode()),
        server=own_server_name(_scheduler),
    )


def _state(
    args: KVArgs,
    target: KVCache,
    draft: Optional[KVCache],
    tp: Tuple[int, int],
    heads: Tuple[Optional[int], Optional[int]],
) -> Tuple[Buffer, ...]:
    """Describes the state that is sent by plan; empty if the engine sends it.

    The engine does not register a draft's sliding windows.
    """
    if len(args.state_types) != 1 or args.state_types[0] not in STATE_BY_PLAN:
        return ()
    order = getattr(args, "swa_kv_cache_layout", None)  # after 0.5.18
    if args.state_types[0] == StateType.SWA and order not in (None, "nhd"):
        return ()
    registered = (args.state_item_lens[0], args.state_data_lens[0])
    if args.state_types[0] == StateType.SWA or not hasattr(draft, "index_k_with_scale_buffer"):
        draft = None
    return describe_pools(target, draft, *registered, True, tp, *heads)


def _aux_widths(args: KVArgs) -> Tuple[int, ...]:
    """Returns the bytes of each metadata row; empty if hidden states are not in their usual row.

    In that case, the rows of a stock rank, which does not send its widths, could not be inferred.
    """
    mask = getattr(envs, "SGLANG_ENABLE_DISAGG_SAMPLING_MASK", None)  # after 0.5.18
    moved = (envs.SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS if mask is None else mask).get()
    widths: List[int] = args.aux_item_lens
    return () if moved or len(widths) <= HIDDEN_STATES else tuple(widths)


def _draft_kv_heads(scheduler: Scheduler) -> Optional[int]:
    """Returns the KV heads of the whole draft model; None if its worker does not expose them."""
    worker: Any = scheduler.draft_worker
    if not hasattr(worker, "_draft_model_runners"):
        return None
    runners = worker._draft_model_runners()
    return runners[0].model_config.get_total_num_kv_heads() if runners else None
