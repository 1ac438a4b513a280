"""The part of `bench_plan.py` about KV heads between TP sizes: packed, sliced, and whole pages.

All three carry the same bytes from the same slots: packed and sliced half of the heads that the
larger rank holds, whole pages the same half between ranks of equal TP. Planning ends with the
arrays that NIXL takes. Stock has no counterpart: it sends slices.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
from bench_common import medians
from msgspec.structs import replace

HEADS, HEAD_BYTES = 8, 256  # KV heads, each of 128 elements of 2 bytes
LAYERS = 64
DIRECTIONS = {"TP 2 to 1": (2, 1), "TP 1 to 2": (1, 2)}  # prefill's and decode's size
PAGE_SIZES = (1, 16, 128)
PAGES = 8192
CHUNK = 8192  # tokens that prefill computes, and sends, at a time
# A worker's region if no other packs: half of 128 MiB, of which it packs into one half at a time.
WORKER_BYTES = 64 << 20
MOST_SLICES = 2_000_000  # copies of a row; more are not counted out
REPEATS = 15
GOAL_MS = 5.0  # for pages in a row
GOAL_OF_WHOLE = 1.5  # times what whole pages take, or as little as nobody notices
UNNOTICED_MS = 1.0
# Slices may be as fast where each page is one token, and has no neighbours.
MIN_SPEEDUP = 0.9
# What packed heads reach of the wire's speed: of flat in a host's or a GPU's memory, where the copy
# itself is the wire, and of whole pages over TCP.
MIN_OF_FLAT = {"in a row": 0.7, "scattered": 0.5}  # the latter from pages of 16 tokens on
MIN_OF_WHOLE = 0.7
# Packing can take as long as it takes alone, and this share more for beginning and end.
MAX_OF_COPY = 1.25


def gqa_layout(kv_layout, tp: tuple[int, int], page_size: int, layers: int = LAYERS):
    """`RankLayout` of a TP rank (rank, size) that sends and interleaves whole rows."""
    held = HEADS // tp[1]
    heads = kv_layout.Heads(tp[0] * held, (tp[0] + 1) * held, HEADS)
    page_bytes = page_size * held * HEAD_BYTES
    kv = tuple(
        kv_layout.Buffer(component, False, layer, page_bytes, heads)
        for component in "kv"
        for layer in range(layers)
    )
    of_rank = (*tp, 0, 1, page_size, "bfloat16", "DRAM", layers, kv)
    return kv_layout.RankLayout(*of_rank, whole_rows=True)


def kv_plan(kv_layout, own, peer, pointers: tuple[list[int], list[int]], is_packed: bool = True):
    """The plan for KV from rank `own` to `peer`, which register these pointers."""
    own, peer = (replace(one, whole_rows=is_packed) for one in (own, peer))
    src, dst = map(kv_layout.Pointers, pointers)
    return kv_layout.plan_for_peer(own, src, peer, dst, can_pack=is_packed).kv


def unit_copies(plan, src: np.ndarray, dst: np.ndarray) -> Iterator:
    """All copies of a chunk, whose packed rows lie at address 0."""
    yield plan.copies(src, dst)
    if getattr(plan, "packs", ()):
        for one in plan.rounds(src, dst, WORKER_BYTES // 2):
            yield one.copies(0)


def make_pages(count: int, is_scattered: bool, seed: int) -> np.ndarray:
    """`count` pages in a row, or without neighbours; int32, as in the engine."""
    numbers = np.random.default_rng(seed).permutation(count) * 2 if is_scattered else range(count)
    return np.array(numbers, np.int32)


def make_plans(kv_layout, direction: str, page_size: int) -> dict[str, object]:
    """The plans that the rows compare."""
    sizes = DIRECTIONS[direction]
    own, peer = (gqa_layout(kv_layout, (0, size), page_size) for size in sizes)
    equal = min(own, peer, key=lambda one: one.kv[0].page_bytes)
    pointers = tuple([(side << 50) + (i << 40) for i in range(2 * LAYERS)] for side in (1, 2))
    return {
        "packed": kv_plan(kv_layout, own, peer, pointers),
        "sliced": kv_plan(kv_layout, own, peer, pointers, is_packed=False),
        "whole pages": kv_plan(kv_layout, equal, equal, pointers),
    }


def check(plans: dict[str, object], src: np.ndarray, dst: np.ndarray) -> dict[str, int]:
    """Returns the number of copies of each plan.

    Raises:
        ValueError: They do not carry the same number of bytes.
    """
    counts, sizes = {}, {}
    for name, plan in plans.items():
        batches = list(unit_copies(plan, src, dst))
        counts[name] = sum(map(len, batches))
        sizes[name] = sum(int(one.arrays()[2].sum()) for one in batches)
    if len(set(sizes.values())) != 1:
        raise ValueError(f"packed, sliced and whole pages carry different bytes: {sizes}")
    return counts


def measure(kv_layout, direction: str, page_size: int, pages: int, is_scattered: bool) -> dict:
    """One row: copies, and milliseconds of processor time to plan them."""
    plans = make_plans(kv_layout, direction, page_size)
    if pages * page_size * 2 * LAYERS > MOST_SLICES:
        del plans["sliced"]
    src, dst = (make_pages(pages, is_scattered, seed) for seed in (1, 2))

    def call(plan) -> Callable[[], None]:
        def plan_and_drop() -> None:
            for one in unit_copies(plan, src, dst):  # as a worker, which sends one after another
                one.descriptors(0, 0)

        return plan_and_drop

    sides = {name: call(plan) for name, plan in plans.items()}
    medians(sides, 1)  # warms up
    seconds = medians(sides, REPEATS, time.process_time)
    return {
        "direction": direction,
        "page_size": page_size,
        "pages": pages,
        "lie": "scattered" if is_scattered else "in a row",
        "copies": check(plans, src, dst),
        "ms": {name: 1e3 * one for name, one in seconds.items()},
    }


def rows(kv_layout) -> list[dict]:
    """All rows. Prefill packs a chunk at a time; without packing, pages may be more."""
    found = []
    for direction, (prefill_tp, decode_tp) in DIRECTIONS.items():
        for page_size in PAGE_SIZES:
            counts = {CHUNK // page_size} | ({PAGES} if prefill_tp > decode_tp else set())
            for pages in sorted(counts):
                for is_scattered in (False, True):
                    found.append(measure(kv_layout, direction, page_size, pages, is_scattered))
    return found


def misses(found: list[dict]) -> list[str]:
    """A sentence for each row that misses its goal."""
    return [
        f"{row['direction']}, {row['pages']} pages of {row['page_size']} in a row: planned in "
        f"{row['ms']['packed']:.1f} ms, goal {GOAL_MS:g}"
        for row in found
        if row["lie"] == "in a row" and row["ms"]["packed"] > GOAL_MS
    ] + [
        f"{row['direction']}, {row['pages']} pages of {row['page_size']} {row['lie']}: planned in "
        f"{row['ms']['packed']:.1f} ms, whole pages in {row['ms']['whole pages']:.1f} ms, goal "
        f"{GOAL_OF_WHOLE:g} times that"
        for row in found
        if row["ms"]["packed"] > max(GOAL_OF_WHOLE * row["ms"]["whole pages"], UNNOTICED_MS)
    ]


def wire_misses(rows: list[dict]) -> list[str]:
    """A sentence for each row that misses its goal."""
    found = []
    for row in rows:
        ms, lie = row["ms"], row["lie"]
        if ms["sliced"] / ms["packed"] < MIN_SPEEDUP:
            found.append(_miss(row, "sliced", MIN_SPEEDUP))
        if "TCP" in row["transport"]:
            if ms["whole"] / ms["packed"] < MIN_OF_WHOLE:
                found.append(_miss(row, "whole", MIN_OF_WHOLE))
            continue
        packs = row["direction"] == "TP 1 to 2"  # in the time of the write
        is_limited = packs and ms["packed"] < MAX_OF_COPY * row["copy ms"]
        too_small = lie == "scattered" and row["page_size"] < 16
        if ms["flat"] / ms["packed"] < MIN_OF_FLAT[lie] and not (is_limited or too_small):
            found.append(_miss(row, "flat", MIN_OF_FLAT[lie]))
    return found


def _miss(row: dict, other: str, goal: float) -> str:
    ms = row["ms"]
    return (
        f"{row['transport']}, {row['direction']}, pages of {row['page_size']} {row['lie']}: packed "
        f"{ms['packed']:.0f} ms, {other} {ms[other]:.0f} ms: {ms[other] / ms['packed']:.2f}, goal "
        f"{goal:g} (the copy alone {row['copy ms']:.0f} ms)"
    )
