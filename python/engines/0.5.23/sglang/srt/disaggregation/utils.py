"""What this rank's registered buffers hold, for prefill and decode alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from sglang.srt.disaggregation.pd.registered import describe

if TYPE_CHECKING:
    from sglang.srt.disaggregation.utils import KVArgs, engine_setup_state_kv_args

RENAMED = (("setup_state_kv_args", "engine_setup_state_kv_args"),)


def setup_state_kv_args(
    kv_args: KVArgs,
    token_to_kv_pool,
    draft_token_to_kv_pool=None,
    total_kv_layers: Optional[int] = None,
    req_to_token_pool=None,
) -> None:
    """Register state, as the engine does; KV is registered by now, and all of it is described.

    Args:
        total_kv_layers: Layers of the whole target model.
    """
    engine_setup_state_kv_args(
        kv_args,
        token_to_kv_pool,
        draft_token_to_kv_pool,
        total_kv_layers,
        req_to_token_pool=req_to_token_pool,
    )
    describe(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers)
