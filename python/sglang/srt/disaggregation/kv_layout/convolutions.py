"""The windows of Mamba 2's convolutions, which lie in one buffer: x, then B, then C.

    B and C are split like x     TP 1    x0 x1 B0 B1 C0 C1     TP 2    x0 B0 C0  and  x1 B1 C1
    B and C have a single group  TP 1    x0 x1 B C             TP 2    x0 B C    and  x1 B C

The groups of B and C are split over the ranks, unless there is a single group: every rank has that.
"""

from __future__ import annotations

from collections.abc import Sequence

from .heads import heads_of_rank, heads_to_send


def replicates_bc(parts: Sequence[int], tp_size: int, channels: int) -> bool:
    """Whether a rank has only its share of the first convolution and all of the others.

    Args:
        parts: Channels of each convolution in the whole model.
        tp_size: Attention TP size of the rank's server; with 1 both cases look the same.
        channels: Channels of all convolutions together on this rank.
    """
    return len(parts) > 1 and parts[0] // tp_size + sum(parts[1:]) == channels


def slice_blocks_with_shared_bc(
    parts: Sequence[int], prefill: tuple[int, int], decode: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Returns the channels to copy from one prefill rank to one decode rank.

    If several prefill ranks serve a decode rank, only the first sends what all of them have.

    Args:
        parts: Channels of each convolution in the whole model; every rank has all but the first.
        prefill, decode: Each side's (rank, size) in attention TP.

    Returns:
        (first source channel, first destination channel, number of channels) per convolution sent.
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
