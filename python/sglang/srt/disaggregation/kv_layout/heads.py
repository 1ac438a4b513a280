"""Which KV heads a rank holds, and which of them it sends to a peer.

    total 4 over TP 2     rank 0: 0 1   rank 1: 2 3
    total 2 over TP 4     rank 0: 0     rank 1: 0     rank 2: 1     rank 3: 1

With more ranks than heads, neighbouring ranks hold the same head: `rank // replicas`.
"""

from __future__ import annotations

from typing import Optional

from .layout import Heads, LayoutError


def heads_of_rank(rank: int, tp_size: int, total: int) -> Heads:
    """Returns the KV heads that rank `rank` of `tp_size` holds, out of the model's `total`.

    Raises:
        LayoutError: Neither of `total` and `tp_size` divides the other, so no engine splits them.
    """
    if total % tp_size == 0:
        each = total // tp_size
        return Heads(rank * each, (rank + 1) * each, total)
    if tp_size % total == 0:
        head = rank // (tp_size // total)
        return Heads(head, head + 1, total)
    raise LayoutError(
        f"{total} KV heads cannot be split over, or replicated on, TP size {tp_size}; "
        "choose a TP size that divides the number of KV heads or is a multiple of it"
    )


def tp_size_conflict(prefill_tp: int, decode_tp: int) -> Optional[str]:
    """Returns why these attention TP sizes cannot serve together; None if they can."""
    if prefill_tp % decode_tp == 0 or decode_tp % prefill_tp == 0:
        return None
    return (
        f"prefill attention TP size {prefill_tp} and decode attention TP size {decode_tp}: "
        "neither divides the other; start one of the servers with a TP size that does"
    )


def pp_size_conflict(prefill_pp: int, decode_pp: int) -> Optional[str]:
    """Returns why these PP sizes cannot serve together; None if they can."""
    if decode_pp in (1, prefill_pp):
        return None
    return (
        f"decode PP size {decode_pp} is neither 1 nor prefill's PP size {prefill_pp}; "
        "start decode with one of these"
    )


def prefill_ranks_of(decode_rank: int, prefill_tp: int, decode_tp: int) -> range:
    """Returns the prefill TP ranks to which the engine's receivers connect a decode TP rank."""
    if prefill_tp >= decode_tp:
        each = prefill_tp // decode_tp
        return range(decode_rank * each, (decode_rank + 1) * each)
    rank = decode_rank // (decode_tp // prefill_tp)
    return range(rank, rank + 1)


def heads_to_send(
    sender: Heads, receiver: Heads, prefill: tuple[int, int], decode: tuple[int, int]
) -> Heads:
    """Returns the heads that one prefill rank writes into one decode rank; possibly none.

    If several prefill ranks serve the decode rank with the same replicated head, the first writes
    it and the others only report that they are done.

    Args:
        sender, receiver: Heads that the two ranks hold.
        prefill, decode: Each side's (rank, size) in attention TP.
    """
    rank, size = prefill
    served_by = prefill_ranks_of(decode[0], size, decode[1])
    if size > sender.total and any(
        heads_of_rank(earlier, size, sender.total) == sender
        for earlier in served_by
        if earlier < rank
    ):
        return Heads(sender.start, sender.start, sender.total)
    return sender & receiver


def parts_of(receiver: Heads, prefill_tp: int, decode: tuple[int, int]) -> list[tuple[int, Heads]]:
    """Returns the prefill TP ranks that write into a decode rank, and the heads that each sends.

    The parts do not overlap, and are in the order of heads.

    Args:
        receiver: Heads that the decode rank holds.
        prefill_tp: Prefill's attention TP size.
        decode: The decode rank and its attention TP size.

    Raises:
        LayoutError: As for `heads_of_rank`.
    """
    parts = []
    for rank in prefill_ranks_of(decode[0], prefill_tp, decode[1]):
        sender = heads_of_rank(rank, prefill_tp, receiver.total)
        sent = heads_to_send(sender, receiver, (rank, prefill_tp), decode)
        if sent.count:
            parts.append((rank, sent))
    return parts
