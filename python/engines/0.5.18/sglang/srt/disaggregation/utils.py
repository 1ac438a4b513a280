"""Describes registered buffers, slices recurrent state, and keeps pages that are written to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Tuple

from sglang.srt.disaggregation.pd.local_layout import set_up_state
from sglang.srt.disaggregation.pd.state_slices import slice_state

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import (
        dist,
        engine_compute_mamba_state_slice_blocks,
        engine_poll_and_all_reduce,
        engine_poll_and_all_reduce_with_staging,
        engine_setup_state_kv_args,
    )

RENAMED = (
    ("poll_and_all_reduce", "engine_poll_and_all_reduce"),
    ("poll_and_all_reduce_with_staging", "engine_poll_and_all_reduce_with_staging"),
    ("compute_mamba_state_slice_blocks", "engine_compute_mamba_state_slice_blocks"),
    ("setup_state_kv_args", "engine_setup_state_kv_args"),
)


def poll_and_all_reduce(pollers, gloo_group: dist.ProcessGroup, *more, **options) -> List[int]:
    """Polls senders or receivers, and returns what a group of ranks agrees on.

    Extends the engine's: a failed request whose pages may be written to is still transferring.
    """
    from sglang.srt.disaggregation.pd.held_pages import keep_held

    polls = engine_poll_and_all_reduce(pollers, gloo_group, *more, **options)
    return keep_held(pollers, polls, gloo_group)


def poll_and_all_reduce_with_staging(
    decode_reqs, staging_handler, gloo_group: dist.ProcessGroup, *more, **options
) -> List[int]:
    """Polls requests that may use staging buffers. Extends the engine's, as above."""
    from sglang.srt.disaggregation.pd.held_pages import keep_held

    staged = (decode_reqs, staging_handler, gloo_group)
    polls = engine_poll_and_all_reduce_with_staging(*staged, *more, **options)
    return keep_held([req.kv_receiver for req in decode_reqs], polls, gloo_group)


def compute_mamba_state_slice_blocks(*args: Any, **options: Any) -> List[Tuple[int, int, int]]:
    """Returns the channels of one state to copy between TP sizes; takes the engine's parameters."""
    return slice_state(engine_compute_mamba_state_slice_blocks, *args, **options)


def setup_state_kv_args(*args: Any, **options: Any) -> None:
    """Lists state buffers, and describes all buffers, see `set_up_state`."""
    from sglang.srt.disaggregation.pd.held_pages import read_release_seconds

    read_release_seconds()  # a wrong value must stop the server at its start
    set_up_state(engine_setup_state_kv_args, *args, **options)
