"""Layouts of ranks that hold K and V of some heads, for tests of head slices."""

from kv_layout import Buffer, RankLayout, heads_of_rank


def layout(tp, kv, page_size=16, **more) -> RankLayout:
    """A rank that holds these KV buffers; `tp` is its number and the TP size."""
    return RankLayout(*tp, 0, 1, page_size, "bfloat16", "VRAM", 4, tuple(kv), **more)


def addresses(buffers, first=1 << 40) -> list[int]:
    """Addresses far from each other, one for each buffer."""
    return [first + (i << 40) for i in range(len(buffers))]


def head_buffers(
    rank, size, total=8, page_size=16, layers=2, widths=(256, 256), names=("k", "v")
) -> tuple[Buffer, ...]:
    """A rank's buffers, of each component all layers; `widths` are bytes per head and token."""
    heads = heads_of_rank(rank, size, total)
    return tuple(
        Buffer(component, False, layer, page_size * heads.count * width, heads, 1 << 14)
        for component, width in zip(names, widths)
        for layer in range(layers)
    )


def rank_of(rank, size, total=8, page_size=16, more=None, **buffers) -> RankLayout:
    """A rank that holds the buffers of `head_buffers`, with `more` fields of its layout."""
    kv = head_buffers(rank, size, total, page_size, **buffers)
    return layout((rank, size), kv, page_size, **more or {})
