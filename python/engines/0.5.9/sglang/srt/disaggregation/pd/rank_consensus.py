"""Ranks of one server act in step: what they think of a request changes for all of them, or not.

    TP ranks of a stage    a vote at each poll: a request has failed when one rank says so, and
                           ends when none is busy with it any more
    pipeline stages        what the first stage made of a request, the others make of it

Threads that take messages leave marks (a room's status), which are looked at only where the
schedulers poll. Between stages a mark may arrive in the middle of a round; within `agreed` a
request's poller reports what the stages have agreed on instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.base.conn import KVPoll

# A sender or a receiver of KV, with `has_pending_transfers`, `fail_with_group` and `is_open` where it needs them.
Poller = Any

# Open rooms of decode that end in failure in one turn of the scheduler, which frees and reports
# each: what runs must not wait for a hundred.
MAX_FAILURES_PER_POLL = 25


def reduce_polls(pollers: Sequence[Poller], polls: Sequence[int], gloo_group) -> List[int]:
    """The state of each request on all ranks of the group, given this rank's.

    The lowest wins, and that is Failed. A request that failed on one rank fails on the others; it
    is Transferring until none of them is busy with it.
    """
    quiet = [
        not (hasattr(poller, "has_pending_transfers") and poller.has_pending_transfers())
        for poller in pollers
    ]
    for i in [i for i, poller in enumerate(pollers) if _may_defer(poller, polls[i])][
        MAX_FAILURES_PER_POLL:
    ]:
        quiet[i] = False
    votes = torch.tensor([list(polls), quiet], dtype=torch.uint8)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=gloo_group)
    states, all_quiet = votes.tolist()
    for i, poller in enumerate(pollers):
        if states[i] == KVPoll.Failed:
            if hasattr(poller, "fail_with_group"):
                poller.fail_with_group()
            if not all_quiet[i]:
                states[i] = KVPoll.Transferring
    return states


def _may_defer(poller: Poller, poll: int) -> bool:
    """Whether a failed request may end in another turn: nowhere but on decode, once it is open."""
    pinned = hasattr(poller, "is_pinned")
    return poll == KVPoll.Failed and not pinned and hasattr(poller, "is_open") and poller.is_open()


@contextmanager
def pinned_polls(requests: Sequence[Tuple[str, Poller]], good, failed) -> Iterator[None]:
    """Let pollers report what the stages agree on, whatever has become known since.

    Args:
        requests: Each request's id and poller.
        good, failed: The state of all these ids, and ids that have failed nonetheless.
    """
    states: Dict[str, int] = {**good, **dict.fromkeys(failed, KVPoll.Failed)}
    pinned = [poller for rid, poller in requests if rid in states]
    for rid, poller in requests:
        if rid in states:
            poller.poll = lambda state=states[rid]: state
            poller.is_pinned = True
    try:
        yield
    finally:
        for poller in pinned:
            del poller.poll, poller.is_pinned
