"""The windows of Mamba 2's convolutions, which lie in one buffer: x, then B, then C.

    B and C are cut like x       TP 1    x0 x1 B0 B1 C0 C1     TP 2    x0 B0 C0  and  x1 B1 C1
    they are of a single group   TP 1    x0 x1 B C             TP 2    x0 B C    and  x1 B C

All groups of B and C are cut over the ranks, or there is a single one and every rank has it whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from .heads import heads_of_rank, heads_to_send


def replicates_bc(parts: Sequence[int], tp_size: int, channels: int) -> bool:
    """Whether a rank with so many channels has its share of the first part and all of the others.

    Args:
        parts: Channels of each convolution in the whole model.
        tp_size: Attention TP size of the rank's server; with 1 there is nothing to tell apart.
        channels: Of all convolutions together, on this rank.
    """
    return len(parts) > 1 and parts[0] // tp_size + sum(parts[1:]) == channels


def slice_blocks_with_shared_bc(
    parts: Sequence[int], prefill: tuple[int, int], decode: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Channels to copy from one prefill rank to one decode rank: (from, to, how many) of each part.

    Of several prefill ranks that serve a decode rank the first alone sends what all of them have.

    Args:
        parts: Channels of each convolution in the whole model; all but the first are on every rank.
        prefill, decode: Each side's (rank, size) in attention TP.
    """
    blocks, ours_at, theirs_at = [], 0, 0
    for number, channels in enumerate(parts):
        total, each = (1, channels) if number else (channels, 1)
        ours, theirs = heads_of_rank(*prefill, total), heads_of_rank(*decode, total)
        sent = heads_to_send(ours, theirs, prefill, decode)
        if sent.count:
            start = ours_at + (sent.start - ours.start) * each
            blocks.append(
                (start, theirs_at + (sent.start - theirs.start) * each, sent.count * each)
            )
        ours_at += ours.count * each
        theirs_at += theirs.count * each
    return blocks
