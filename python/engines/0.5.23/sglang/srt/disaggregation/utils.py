"""Describes this rank's registered buffers, and slices recurrent state between TP sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Tuple

from sglang.srt.disaggregation.pd.local_layout import set_up_state
from sglang.srt.disaggregation.pd.state_slices import slice_state

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import (
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


def setup_state_kv_args(*args: Any, **options: Any) -> None:
    """Lists state buffers, and describes all buffers, see `set_up_state`."""
    set_up_state(engine_setup_state_kv_args, *args, **options)
