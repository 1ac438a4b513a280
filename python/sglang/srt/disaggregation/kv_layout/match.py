"""Pairs a sender's buffers with the receiver's by what they hold.

    prefill stage 1 of 2            decode, all layers
    k: layer 2, layer 3             k: layer 0, 1, 2, 3     draft k: layer 0
    v: layer 2, layer 3             v: layer 0, 1, 2, 3     draft v: layer 0

    k2 -> k2, k3 -> k3, v2 -> v2, v3 -> v3; the draft has no sender here and is not written.

A pair agrees in component, model and layer, and carries the heads that both sides hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

from .heads import heads_to_send, pp_size_conflict, tp_size_conflict
from .layout import (
    Buffer,
    Heads,
    LayoutError,
    RankLayout,
    has_fused_conv_state,
    is_opaque,
    is_recurrent,
)


@dataclass(frozen=True)
class BufferPair:
    """One source buffer, one destination buffer, and which bytes of each page are copied.

    Attributes:
        src, dst: Indices into the two sides' buffer tuples.
        whole: Whether a page is copied in one piece, because both sides hold the same heads.
        src_offset, dst_offset: Bytes from a token's start to the first head copied; 0 if whole.
        row_bytes: Bytes copied from each token, or from each page if whole.
    """

    src: int
    dst: int
    whole: bool
    src_offset: int
    dst_offset: int
    row_bytes: int


def incompatibilities(src: RankLayout, dst: RankLayout) -> list[str]:
    """Returns every reason why prefill `src` must not send to decode `dst`; empty if it may."""
    conflicts = (
        tp_size_conflict(src.tp_size, dst.tp_size),
        pp_size_conflict(src.pp_size, dst.pp_size),
    )
    reasons = [conflict for conflict in conflicts if conflict]
    if is_recurrent(src) and src.pp_size != dst.pp_size:
        # Every stage allocates all recurrent layers and computes only its own.
        reasons.append(
            f"recurrent state: prefill PP size {src.pp_size}, decode PP size {dst.pp_size}; "
            "use the same PP size for hybrid models"
        )
    if has_fused_conv_state(src) and src.tp_size != dst.tp_size:
        reasons.append(
            f"recurrent state: prefill TP size {src.tp_size}, decode TP size {dst.tp_size}; its "
            "convolutions share one buffer, which cannot be split; use the same TP size for this "
            "model"
        )
    if is_opaque(src) or is_opaque(dst):
        ours, theirs = ((side.tp_size, len(side.kv), len(side.state)) for side in (src, dst))
        if ours != theirs:
            reasons.append(
                "the patch set does not support this model's KV pool, so both servers must split "
                f"it the same way: TP size, KV and state buffers are {ours} on prefill, {theirs} "
                "on decode; use the same TP and PP size, and a draft model on both sides or on "
                "neither"
            )
    for what, ours, theirs in (
        ("page size", src.page_size, dst.page_size),
        ("number of layers", src.total_layers, dst.total_layers),
        ("KV dtype", src.dtype, dst.dtype),
    ):
        if ours != theirs:
            reasons.append(
                f"{what}: prefill has {ours}, decode has {theirs}; "
                "start both servers with the same model and the same value"
            )
    return reasons


def match_buffers(
    src: RankLayout,
    dst: RankLayout,
    src_buffers: tuple[Buffer, ...],
    dst_buffers: tuple[Buffer, ...],
) -> tuple[BufferPair, ...]:
    """Returns pairs for all that `src` must write into `dst`, in the order of `src_buffers`.

    Leaves out unused buffers, draft buffers that only one side has, index keys that either side
    elides, and pairs that carry no head.

    Raises:
        LayoutError: The destination lacks a buffer of the target model, or the two sides' pages
            cannot hold the same data.
    """
    pairs = (
        _pair(src, dst, i, j, src_buffers[i], dst_buffers[j])
        for i, j in match_layers(src, dst, src_buffers, dst_buffers)
        if not (is_elided(src_buffers[i]) or is_elided(dst_buffers[j]))
    )
    return tuple(pair for pair in pairs if pair.row_bytes)


def is_elided(buffer: Buffer) -> bool:
    """Whether the layer has no index keys of its own, which each server's options decide."""
    return buffer.component == "index_k" and not buffer.page_bytes


def match_layers(
    src: RankLayout,
    dst: RankLayout,
    src_buffers: tuple[Buffer, ...],
    dst_buffers: tuple[Buffer, ...],
) -> Iterator[tuple[int, int]]:
    """Yields (source, destination) indices of buffers of the same component and layer.

    Ignores heads. Leaves out unused buffers, and draft buffers that only one side has.

    Raises:
        LayoutError: The destination lacks a buffer of the target model.
    """
    where = {buffer.key: i for i, buffer in enumerate(dst_buffers) if not buffer.unused}
    for i, buffer in enumerate(src_buffers):
        if buffer.unused:
            continue
        j = where.get(buffer.key)
        if j is not None:
            yield i, j
        elif not buffer.draft:
            raise LayoutError(
                f"prefill ({src.name}) must send {buffer.name}, which decode ({dst.name}) does not "
                f"hold: it registered {_summary(dst_buffers)}; serve the same model on both sides"
            )


def _pair(
    src: RankLayout, dst: RankLayout, i: int, j: int, ours: Buffer, theirs: Buffer
) -> BufferPair:
    if ours.heads == theirs.heads and (ours.heads is None or src.tp_size <= ours.heads.total):
        if ours.page_bytes != theirs.page_bytes:
            raise _unequal("bytes per page", ours, ours.page_bytes, theirs.page_bytes)
        return BufferPair(i, j, True, 0, 0, ours.page_bytes)
    if ours.heads is None or theirs.heads is None:
        raise _unequal("KV heads", ours, ours.heads or "none", theirs.heads or "none")
    if ours.heads.total != theirs.heads.total:
        raise _unequal("total KV heads", ours, ours.heads.total, theirs.heads.total)
    head = _head_bytes(ours, src.page_size)
    if head != _head_bytes(theirs, dst.page_size):
        raise _unequal("bytes per head", ours, head, _head_bytes(theirs, dst.page_size))
    share = heads_to_send(
        ours.heads, theirs.heads, (src.tp_rank, src.tp_size), (dst.tp_rank, dst.tp_size)
    )
    whole = share == ours.heads == theirs.heads
    return BufferPair(
        i,
        j,
        whole,
        0 if whole else (share.start - ours.heads.start) * head,
        0 if whole else (share.start - theirs.heads.start) * head,
        share.count * head * (src.page_size if whole else 1),
    )


def _head_bytes(buffer: Buffer, page_size: int) -> int:
    """Returns the bytes of one head of one token."""
    heads: Heads = buffer.heads
    size, rest = divmod(buffer.page_bytes, page_size * heads.count)
    if rest:
        raise LayoutError(
            f"{buffer.name}: {buffer.page_bytes} bytes per page are not {page_size} tokens of "
            f"{heads.count} heads; the pool does not match its description"
        )
    return size


def _unequal(what: str, buffer: Buffer, ours: object, theirs: object) -> LayoutError:
    return LayoutError(
        f"{buffer.name}, {what}: prefill has {ours}, decode has {theirs}; "
        "start both servers with the same model, KV dtype and page size"
    )


def draft_mismatch(src: RankLayout, dst: RankLayout) -> Optional[str]:
    """Returns a warning if only one side has a draft model, whose buffers are then left out."""
    if src.pp_rank != src.pp_size - 1:
        return None  # only the last stage has a draft
    ours, theirs = (sum(buffer.draft for buffer in side.kv + side.state) for side in (src, dst))
    if ours and not theirs:
        return f"decode has no draft model; {ours} buffers of prefill's draft are not sent"
    if theirs and not ours:
        return f"prefill has no draft model; {theirs} buffers of decode's draft are not written"
    return None


def _summary(buffers: tuple[Buffer, ...]) -> str:
    """Summarizes buffers, such as `k layers 0-3, draft k layers 0-0`."""
    spans: dict[str, list[int]] = {}
    for buffer in buffers:
        if buffer.unused:
            continue
        spans.setdefault(f"{'draft ' if buffer.draft else ''}{buffer.component}", []).append(
            buffer.layer
        )
    return ", ".join(f"{k} layers {min(v)}-{max(v)}" for k, v in spans.items()) or "nothing"
