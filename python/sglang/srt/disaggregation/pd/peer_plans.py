"""The plan for a decode rank that registers, made from its description or its registration."""

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
    can_pack: bool = False,
) -> PeerPlan:
    """Returns the plan for the decode rank `name`.

    Args:
        own, own_pointers: This prefill rank's description and pointers.
        layout: The decode rank's description; None if it sends none.
        facts, pointers: What every decode rank registers.
        can_pack: Whether this prefill rank has a packing buffer.

    Raises:
        LayoutError: The two ranks cannot work together.
    """
    if layout is None:
        logger.warning(
            f"Decode {name} does not describe its KV buffers; they are inferred from the model of "
            "this server."
        )
    plan = plan_for_peer(own, own_pointers, layout or facts, pointers, can_pack)
    for unsent in (draft_mismatch, unsent_rows_message):
        said = unsent(own, plan.layout)
        if said:
            logger.warning(f"Decode {name}: {said}")
    return plan
