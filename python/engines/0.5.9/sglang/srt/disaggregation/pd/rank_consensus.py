"""Ranks of one server act in step: a request's status changes on all of them, or on none.

    TP ranks of a stage    vote at each poll: a request has failed once one rank reports that, and
                           concludes once no rank is busy with it
    pipeline stages        follow the first stage in what it did with a request

Threads that read messages only set a room's status; schedulers act on it where they poll. Between
stages a status may change in the middle of a round; within `pinned_polls` a request's status is
what the stages have agreed on instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from sglang.srt.disaggregation.base.conn import BaseKVReceiver, BaseKVSender, KVPoll

# A sender or receiver; some have no `has_pending_transfers`, `fail_with_group` or `is_open`.
Poller = BaseKVSender | BaseKVReceiver

# The most open rooms that fail in one turn of decode's scheduler, which frees and reports each:
# running requests must not wait for a hundred.
MAX_FAILURES_PER_POLL = 25

# Within `pinned_polls`: by the id of its poller, the status of a request that is agreed on.
_pinned: dict[int, int] = {}


def poll(poller: Poller) -> int:
    """Returns a request's status on this rank; within `pinned_polls`, what the stages agree on."""
    state = _pinned.get(id(poller))
    return poller.poll() if state is None else state


def reduce_polls(
    pollers: Sequence[Poller], polls: Sequence[int], gloo_group: dist.ProcessGroup
) -> list[int]:
    """Returns each request's status on all ranks of the group, given this rank's.

    The lowest status wins, and Failed is the lowest. A request that failed on one rank fails on the
    others; it stays Transferring until no rank is busy with it.
    """
    quiet = [
        not (hasattr(poller, "has_pending_transfers") and poller.has_pending_transfers())
        for poller in pollers
    ]
    may_wait = [i for i, poller in enumerate(pollers) if _may_defer(poller, polls[i])]
    for i in may_wait[MAX_FAILURES_PER_POLL:]:
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


def _may_defer(poller: Poller, state: int) -> bool:
    """Whether a failed request may conclude in another turn: only on decode, once it is open."""
    may_defer = state == KVPoll.Failed and id(poller) not in _pinned
    return may_defer and hasattr(poller, "is_open") and poller.is_open()


@contextmanager
def pinned_polls(
    requests: Sequence[tuple[str, Poller]], good: Mapping[str, int], failed: Sequence[str]
) -> Iterator[None]:
    """Makes `poll` return what the stages agree on, whatever has changed since.

    Args:
        requests: Each request's id and poller.
        good: The status of each request that the stages agree on, by id.
        failed: Ids of requests that have failed nonetheless.
    """
    states = {**good, **dict.fromkeys(failed, KVPoll.Failed)}
    _pinned.update((id(poller), states[rid]) for rid, poller in requests if rid in states)
    try:
        yield
    finally:
        _pinned.clear()
