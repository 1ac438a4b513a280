"""Fills `KVArgs` with this rank's buffers, and describes what they hold, from its real pools."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.kv_layout import (
    HIDDEN_STATES,
    Buffer,
    LayoutError,
    RankLayout,
    describe_pools,
    describe_unknown,
    memory_kind,
    total_heads,
)
from sglang.srt.disaggregation.pd.file_guard import check_engine_files
from sglang.srt.disaggregation.pd.peer_silence import read_silent_seconds
from sglang.srt.disaggregation.pd.pool_views import set_views
from sglang.srt.disaggregation.pd.room_failures import read_release_seconds
from sglang.srt.disaggregation.pd.server_names import own_server_name
from sglang.srt.disaggregation.pd.verify import make_verifier
from sglang.srt.disaggregation.pd.verify_mode import verify_mode

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.disaggregation.base import BaseKVManager, KVArgs
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler import Scheduler

    Queue = PrefillBootstrapQueue | DecodePreallocQueue

logger = logging.getLogger(__name__)


def make_kv_manager(queue: Queue, kv_args: KVArgs, mode: DisaggregationMode) -> BaseKVManager:
    """Describes a queue's pools, and makes the KV manager, which registers them.

    Args:
        kv_args: Has what only the queue knows: this rank's number, and the other side's sizes.
    """
    from sglang.srt.disaggregation.utils import KVClassType, get_kv_class, setup_state_kv_args

    scheduler = queue.scheduler
    pools = queue.token_to_kv_pool, queue.draft_token_to_kv_pool
    setup_kv_args(kv_args, queue)
    setup_state_kv_args(kv_args, *pools, scheduler.model_config.num_hidden_layers)
    set_local_layout(kv_args, queue)
    set_views(kv_args, pools)
    kv_args.verifier = make_verifier(kv_args, pools)
    manager = get_kv_class(queue.transfer_backend, KVClassType.MANAGER)
    return manager(kv_args, mode, scheduler.server_args, queue.is_mla_backend)


def setup_kv_args(kv_args: KVArgs, queue: Queue) -> None:
    """Records KV, draft KV and aux buffers in `kv_args`, and which rank this is.

    The draft's pages have the target's indices, so its buffers follow the target's in one list.
    """
    from sglang.srt.disaggregation.utils import is_mla_backend

    scheduler, target = queue.scheduler, queue.token_to_kv_pool
    ptrs, lens, item_lens = [], [], []
    for pool in (target, queue.draft_token_to_kv_pool):
        if pool is not None:
            for whole, part in zip((ptrs, lens, item_lens), pool.get_contiguous_buf_infos()):
                whole.extend(part)
    kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens = ptrs, lens, item_lens
    kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens = (
        queue.metadata_buffers.get_buf_infos()
    )
    kv_args.pp_rank = queue.pp_rank
    kv_args.system_dp_rank = scheduler.dp_rank
    kv_args.page_size = target.page_size
    kv_args.ib_device = scheduler.server_args.disaggregation_ib_device
    kv_args.gpu_id = scheduler.gpu_id
    if not is_mla_backend(target):
        kv_args.kv_head_num = target.head_num


def set_local_layout(kv_args: KVArgs, queue: Queue) -> None:
    """Sets `kv_args.layout`: what each buffer in `kv_args` holds.

    Of pools that cannot be described, it has only sizes: their KV is sent as stock sends it, and
    both servers must split the model the same way.

    Raises:
        ValueError: A variable of the patch set is wrong.
    """
    from sglang.srt.layers.dp_attention import get_attention_tp_rank, get_attention_tp_size

    check_engine_files()
    read_silent_seconds()
    read_release_seconds()
    scheduler, pool = queue.scheduler, queue.token_to_kv_pool
    tp_rank, tp_size = get_attention_tp_rank(), get_attention_tp_size()
    try:
        kv, state = _describe_buffers(kv_args, queue, (tp_rank, tp_size))
    except Exception as error:
        is_known = isinstance(error, LayoutError)
        logger.warning(
            f"Unsupported KV layout of {type(pool).__name__}, both servers must split "
            f"the model the same way: {error}",
            exc_info=not is_known,
        )
        kv = describe_unknown(kv_args.kv_item_lens, kv_args.kv_data_lens)
        state = describe_unknown(kv_args.state_item_lens, kv_args.state_data_lens)
    kv_args.layout = RankLayout(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=kv_args.pp_rank,
        pp_size=scheduler.server_args.pp_size,
        page_size=kv_args.page_size,
        dtype=str(pool.dtype).removeprefix("torch."),
        memory=memory_kind(pool),
        total_layers=scheduler.model_config.num_hidden_layers,
        kv=kv,
        state=state,
        aux=_aux_widths(kv_args, scheduler),
        aux_slots=min(map(int.__floordiv__, kv_args.aux_data_lens, kv_args.aux_item_lens)),
        verifies=bool(verify_mode()),
        server=own_server_name(scheduler),
    )


def _describe_buffers(
    args: KVArgs, queue: Queue, tp: tuple[int, int]
) -> tuple[tuple[Buffer, ...], tuple[Buffer, ...]]:
    """Describes the KV buffers and the state buffers; `tp` is the attention TP rank and size."""
    scheduler, target = queue.scheduler, queue.token_to_kv_pool
    draft = queue.draft_token_to_kv_pool
    runner = scheduler.tp_worker.model_runner
    computed = range(runner.start_layer, runner.end_layer)
    drafts = None if draft is None else _draft_config(scheduler)

    def described(lens: Sequence[int], sizes: Sequence[int], is_state: bool) -> tuple[Buffer, ...]:
        heads = [
            None if config is None else total_heads(config, pool, is_state)
            for config, pool in ((scheduler.model_config, target), (drafts, draft))
        ]
        return describe_pools(target, draft, lens, sizes, is_state, tp, *heads, computed)

    kv = described(args.kv_item_lens, args.kv_data_lens, False)
    return kv, described(args.state_item_lens, args.state_data_lens, True)


def _aux_widths(kv_args: KVArgs, scheduler: Scheduler) -> tuple[int, ...]:
    """Returns the bytes of each metadata row.

    With STANDALONE speculation the row of hidden states is not used, and is wide only on prefill:
    its width is 0.
    """
    widths = list(kv_args.aux_item_lens)
    if scheduler.spec_algorithm.is_standalone():
        widths[HIDDEN_STATES] = 0
    return tuple(widths)


def _draft_config(scheduler: Scheduler) -> ModelConfig:
    """Returns the draft model's config; overlap wraps its worker once more."""
    worker = scheduler.draft_worker
    inner = getattr(worker, "draft_worker", None)
    if inner is not None:
        worker = (
            inner.draft_runner_list[0]
            if hasattr(inner, "draft_runner_list")
            else inner.draft_runner
        )
    return worker.model_config
