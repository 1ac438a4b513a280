"""Describes this rank's registered buffers, and slices recurrent state between TP sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Tuple

from sglang.srt.disaggregation.pd.local_layout import set_local_layout
from sglang.srt.disaggregation.pd.state_slices import slice_state

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import (
        KVArgs,
        engine_compute_mamba_state_slice_blocks,
        engine_setup_state_kv_args,
    )

RENAMED = (
    ("compute_mamba_state_slice_blocks", "engine_compute_mamba_state_slice_blocks"),
    ("setup_state_kv_args", "engine_setup_state_kv_args"),
)


def compute_mamba_state_slice_blocks(*args: Any, **options: Any) -> List[Tuple[int, int, int]]:
    """Returns the channels of one state to copy between TP sizes; takes the engine's parameters."""
    return slice_state(engine_compute_mamba_state_slice_blocks, *args, **options)


def setup_state_kv_args(
    kv_args: KVArgs, token_to_kv_pool, draft_token_to_kv_pool=None, total_kv_layers=None, **more
) -> None:
    """Lists state buffers in `kv_args`. Extends the engine's: describes all buffers in it.

    Args:
        total_kv_layers: Layers of the whole target model.
    """
    pools = (token_to_kv_pool, draft_token_to_kv_pool)
    engine_setup_state_kv_args(kv_args, *pools, total_kv_layers, **more)
    set_local_layout(kv_args, *pools, total_kv_layers)
