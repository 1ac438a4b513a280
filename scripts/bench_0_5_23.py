"""What `bench_plan.py` does differently in releases after 0.5.9.

There the engine's methods read the configuration that the process has published, and a NIXL request
names blocks of two lists, which are prepared once for each peer:

    run: address, length, device, stride, 3        blocks 0 1 2
    run: address, length, device, stride, 3        blocks 3 4 5
"""

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy as np


def publish_defaults() -> None:
    """Publish the default configuration of a prefill server in this process."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="none", device="cpu", disaggregation_mode="prefill")
    publish(arguments, role="scheduler")


def forget_metrics(module: ModuleType) -> None:
    """Unregister a module's metrics, which allows the process to load the module again."""
    from prometheus_client import REGISTRY
    from prometheus_client.metrics import MetricWrapperBase

    for value in list(vars(module).values()):
        if isinstance(value, MetricWrapperBase):
            REGISTRY.unregister(value)


def complete_manager(manager, info: SimpleNamespace, own, peer, pages: int) -> None:
    """Set what a manager's calls also read, and prepare NIXL's lists as for a registration.

    Args:
        info: The peer's registration.
        own, peer: `RankLayout` of both ranks.
        pages: Number of pages in each buffer.
    """
    heads, lengths = own.kv[0].heads, [buffer.page_bytes for buffer in peer.kv]
    vars(manager).update(
        pp_size=1,
        is_hybrid_mla_backend=False,
        max_transfer_batch_indices=0,  # the engine's default
        src_mem_kind="VRAM",
        prep_handles={},
        prep_handle_slice_src=None,
        prep_handles_slice_dst={},
        _num_slots_src=pages,
    )
    vars(manager.kv_args).update(
        kv_layer_ids=[],
        kv_data_lens=[buffer.page_bytes * pages for buffer in own.kv],
        total_kv_head_num=heads.total if heads else 0,
    )
    vars(info).update(
        requires_dcp_relayout=False,
        decode_tp_rank=peer.tp_rank,
        decode_tp_size=peer.tp_size,
        dst_kv_item_len=lengths[0],
        dst_kv_item_lens=lengths,
        dst_kv_layer_ids=[],
        dst_kv_mem_kinds=["VRAM"] * len(lengths),
        dst_num_slots=pages,
    )
    if hasattr(manager, "_prepare_payload_xfer"):
        manager._prepare_payload_xfer(info)


def notices(send: Callable, notice: str) -> tuple[str, ...]:
    """What else a method that sends over NIXL takes: in 0.5.18 decode's notification."""
    return (notice,) if "notif" in inspect.signature(send).parameters else ()


def descriptors(runs: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """The address, length and device, `[blocks, 3]`, of these blocks in a prepared list.

    Stock 0.5.18's lists have a row for each block.

    Raises:
        IndexError: The list does not have a block.
    """
    if runs.shape[1] == 3:
        return runs[blocks].astype(np.int64)
    address, length, device, stride, held = runs.astype(np.int64).T
    ends = held.cumsum()
    if blocks.size and not 0 <= blocks.min() <= blocks.max() < ends[-1]:
        raise IndexError(f"blocks {blocks.min()} to {blocks.max()} of {ends[-1]}")
    run = ends.searchsorted(blocks, side="right")
    at = address[run] + (blocks - (ends - held)[run]) * stride[run]
    return np.stack((at, length[run], device[run]), axis=1)
