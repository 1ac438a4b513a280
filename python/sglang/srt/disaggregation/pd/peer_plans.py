"""The plan for a decode rank that has registered, by its description or by what it registers."""

from __future__ import annotations

import logging
from typing import Optional

from sglang.srt.disaggregation.kv_layout import (
    PeerPlan,
    Pointers,
    RankLayout,
    StockRegistration,
    draft_mismatch,
    plan_for_peer,
    unsent_rows_message,
)

logger = logging.getLogger(__name__)


def plan_registered(
    name: str,
    own: RankLayout,
    own_pointers: Pointers,
    layout: Optional[RankLayout],
    facts: StockRegistration,
    pointers: Pointers,
) -> PeerPlan:
    """The copies to the decode rank of this name.

    Args:
        own, own_pointers: This prefill rank's.
        layout: The peer's description; None where it sends none.
        facts, pointers: What it registers in any case.

    Raises:
        LayoutError: The two cannot work together.
    """
    if layout is None:
        logger.warning(
            f"Decode {name} runs a release that does not describe its KV buffers; "
            "they are taken to be those of the same model."
        )
    plan = plan_for_peer(own, own_pointers, layout or facts, pointers)
    for unsent in (draft_mismatch, unsent_rows_message):
        said = unsent(own, plan.layout)
        if said:
            logger.warning(f"Decode {name}: {said}")
    return plan
