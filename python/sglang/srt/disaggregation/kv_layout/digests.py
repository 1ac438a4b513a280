"""Digests of one request's pages, with which decode checks that it received what prefill has.

                   page 0   page 1   page 2
    k, layer 0      d00      d01      d02     -> row of this part
    k, layer 1      d10      d11      d12     -> row of this part
                     v        v        v
                   column   column   column

A rank digests each page of each part; a part is what it sends of one buffer, whole pages or some
heads of them. These digests stay on the rank, which sends only their weighted sums: rows and
columns. A part that differs shows in its row, a page that differs in its column, and swapped data
in both, because the weights depend on the part and on the page's place in the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

import msgspec
import numpy as np
import numpy.typing as npt

from .heads import heads_to_send
from .layout import Buffer, Heads, LayoutError, RankLayout
from .match import is_elided, match_buffers

Words = npt.NDArray[np.uint64]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What a prefill rank sends of one buffer: whole pages, or these heads of them."""

    component: str
    draft: bool
    layer: int
    heads: Optional[Heads] = None

    @property
    def key(self) -> tuple[str, bool, int]:
        """The `key` of the buffer that holds the part."""
        return (self.component, self.draft, self.layer)

    @property
    def name(self) -> str:
        """The part's name in messages, such as `draft k, layer 0, KV heads [0,2) of 4`."""
        heads = "" if self.heads is None else f", KV heads {self.heads}"
        return f"{'draft ' if self.draft else ''}{self.component}, layer {self.layer}{heads}"

    @property
    def weight(self) -> int:
        """An odd 64-bit number that depends on all fields of the part."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).digest()
        return int.from_bytes(digest, "little") | 1


class Digests(msgspec.Struct, frozen=True, array_like=True):
    """Digests of some parts over the same pages, as little-endian words of 8 bytes.

    Attributes:
        parts: What was digested.
        rows: One word for each part.
        columns: One word for each page.
    """

    parts: tuple[Part, ...]
    rows: bytes
    columns: bytes


class RoomDigests(msgspec.Struct, frozen=True, array_like=True):
    """Digests of what one prefill rank sent to one decode rank.

    Attributes:
        sender: Name of the prefill rank, such as `DP 1 TP 0/2 PP 1/2`.
        left_out: Index keys that the prefill rank does not have, and decode may have.
    """

    sender: str
    kv: Digests
    state: Optional[Digests] = None
    left_out: tuple[Part, ...] = ()


_decoder = msgspec.msgpack.Decoder(RoomDigests)


def encode_digests(digests: RoomDigests) -> bytes:
    """Encodes digests in about 30 bytes per part and 8 per page."""
    return msgspec.msgpack.encode(digests)


def decode_digests(frame: bytes) -> RoomDigests:
    """Decodes a frame of digests. Raises LayoutError if the frame is invalid."""
    try:
        digests = _decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise LayoutError(f"digests of {len(frame)} bytes cannot be read: {error}") from error
    for one in filter(None, (digests.kv, digests.state)):
        if len(one.rows) != 8 * len(one.parts) or len(one.columns) % 8:
            raise LayoutError(
                f"digests of {len(one.parts)} parts have {len(one.rows)} bytes of rows and "
                f"{len(one.columns)} of columns"
            )
    return digests


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a page: `length` from `start` in each of the page's `rows` equal rows.

    `buffer` is the index of the page's buffer.
    """

    buffer: int
    rows: int
    start: int
    length: int


def sent_parts(
    src: RankLayout,
    dst: RankLayout,
    src_buffers: tuple[Buffer, ...],
    dst_buffers: tuple[Buffer, ...],
) -> tuple[Part, ...]:
    """Returns what prefill `src` sends to decode `dst`, in the order of `src_buffers`.

    Args:
        src_buffers, dst_buffers: The two sides' KV buffers, or their state buffers.

    Raises:
        LayoutError: As for `match_buffers`.
    """
    parts = []
    for pair in match_buffers(src, dst, src_buffers, dst_buffers):
        ours, theirs = src_buffers[pair.src], dst_buffers[pair.dst]
        heads = ours.heads
        if heads is not None:
            sizes = ((src.tp_rank, src.tp_size), (dst.tp_rank, dst.tp_size))
            heads = heads_to_send(heads, theirs.heads, *sizes)
        parts.append(Part(*ours.key, heads))
    return tuple(parts)


def elided_parts(layout: RankLayout) -> tuple[Part, ...]:
    """Returns the index keys of layers that have none of their own on this rank."""
    return tuple(Part(*one.key) for one in (*layout.kv, *layout.state) if is_elided(one))


def byte_ranges(
    parts: Iterable[Part], layout: RankLayout, buffers: Sequence[Buffer]
) -> list[ByteRange]:
    """Returns where a rank holds each part.

    Raises:
        LayoutError: The rank does not hold a part.
    """
    held = {buffer.key: i for i, buffer in enumerate(buffers) if not buffer.unused}
    slices = []
    for part in parts:
        if part.key not in held:
            raise LayoutError(f"{layout.name} does not hold {part.name}")
        slices.append(_slice(part, layout, held[part.key], buffers[held[part.key]]))
    return slices


def _slice(part: Part, layout: RankLayout, i: int, buffer: Buffer) -> ByteRange:
    if part.heads is None or buffer.heads is None:
        if part.heads != buffer.heads:
            raise LayoutError(
                f"{layout.name} holds {buffer.name}, KV heads {buffer.heads or 'not split'}; the "
                f"other side holds {part.name}"
            )
        return ByteRange(i, 1, 0, buffer.page_bytes)
    if part.heads & buffer.heads != part.heads:
        raise LayoutError(
            f"{layout.name} holds KV heads {buffer.heads}, which do not include {part.name}"
        )
    head = buffer.page_bytes // (layout.page_size * buffer.heads.count)
    start = (part.heads.start - buffer.heads.start) * head
    return ByteRange(i, layout.page_size, start, part.heads.count * head)


def summarize(parts: tuple[Part, ...], pages: npt.NDArray[np.int64]) -> Digests:
    """Returns rows and columns for the digests of single pages, `[parts, pages]`."""
    words = np.ascontiguousarray(pages).view(np.uint64)
    rows = (words * position_weights(words.shape[1])).sum(axis=1, dtype=np.uint64)
    of_part = np.array([part.weight for part in parts], dtype=np.uint64)
    columns = (words * of_part[:, None]).sum(axis=0, dtype=np.uint64)
    return Digests(parts, rows.tobytes(), columns.tobytes())


def position_weights(count: int) -> Words:
    """Returns odd pseudo-random numbers, the same in every process: SplitMix64 from seed 0."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def describe_difference(
    sent: Digests, arrived: Digests, tokens_per_page: Optional[int]
) -> Optional[str]:
    """Returns what differs, in words; None if all is equal. Both must be of the same parts.

    Args:
        tokens_per_page: None for state, whose pages and slots are not counted from a first token.
    """
    wrong = _wrong_parts(sent, arrived)
    columns = _words(sent.columns), _words(arrived.columns)
    counts = tuple(map(len, columns))
    if counts[0] != counts[1]:
        return f"prefill has {counts[0]} pages of this request, decode {counts[1]}"
    pages = np.flatnonzero(columns[0] != columns[1])
    if not wrong and not pages.size:
        return None
    what = wrong[0].name if wrong else "an unidentified one"
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    where = "" if not pages.size else _place(int(pages[0]), pages.size, counts[0], tokens_per_page)
    return f"{what}{more} of {len(sent.parts)} parts{where}"


def differing_buffers(sent: Digests, arrived: Digests) -> list[str]:
    """Returns names of what `describe_difference` describes, the same for each request."""
    if len(sent.columns) != len(arrived.columns):
        return ["the number of pages"]
    return [part.name for part in _wrong_parts(sent, arrived)] or ["an unidentified buffer"]


def _wrong_parts(sent: Digests, arrived: Digests) -> list[Part]:
    rows = zip(sent.parts, _words(sent.rows), _words(arrived.rows))
    return [part for part, ours, theirs in rows if ours != theirs]


def _place(page: int, wrong: int, count: int, tokens: Optional[int]) -> str:
    last = (page + 1) * (tokens or 1) - 1
    at = f"tokens {page * (tokens or 1)} to {last}" if tokens != 1 else f"token {page}"
    at = "" if tokens is None else f" ({at} of those sent)"
    return f"; first wrong page {page} of {count}{at}, {wrong} in all"


def missing_parts(buffers: Sequence[Buffer], parts: Iterable[Part]) -> list[str]:
    """Returns the target model's buffers, or heads, of which no prefill rank sent a digest."""
    held: dict[tuple, set[int]] = {}
    for part in parts:
        heads = part.heads
        held.setdefault(part.key, set()).update(
            (-1,) if heads is None else range(heads.start, heads.stop)
        )
    missing = []
    for buffer in buffers:
        heads = buffer.heads
        wanted = {-1} if heads is None else set(range(heads.start, heads.stop))
        left = wanted - held.get(buffer.key, set())
        if left and not (buffer.draft or buffer.unused or is_elided(buffer)):
            missing.append(
                buffer.name if heads is None else f"{buffer.name}, KV heads {sorted(left)}"
            )
    return missing


def _words(data: bytes) -> Words:
    return np.frombuffer(data, np.uint64)
