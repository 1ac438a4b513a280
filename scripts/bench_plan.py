"""Stock's transfer planning against ours, in one process with the stock engine.

Run by `scripts/bench.sh plan`. Both sides get the same transfer by the engine's own call, on
managers without a network. A fake transport accepts what a real one accepts: three lists
(MemFabric, Mooncake), two arrays `[n, 3]` (NIXL) or numbers of prepared blocks (NIXL in later
releases, see `bench_0_5_23`). "Ours" is the patched engine, imported after the stock one. The bench
checks that both copy the same bytes before it times anything.
"""

import dataclasses
import gc
import importlib
import itertools
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated

import bench_0_5_23
import bench_packed
import bench_windows
import numpy as np
import typer
from bench_common import PLAN, PLAN_PACKED, JsonFile, console, finish, medians, show

from pd_harness.releases import release

LATER = release() != "0.5.9"  # then the engine's managers are those of `bench_0_5_23`
PATCHED = Path(sys.prefix).parent / "patched"
ENGINE = "sglang.srt.disaggregation"
BACKENDS = {"ascend": "AscendKVManager", "mooncake": "MooncakeKVManager", "nixl": "NixlKVManager"}
PEER = "peer"
NOTIFICATION = "1_kv_0_1_0"  # of room 1
PAGE_SIZE = 128  # tokens
ELEMENT = 2  # bytes, bfloat16
CHECKED_PAGES = [1, 2, 5, 16]
PAGE_COUNTS = [1, 2, 4, 16, 64, 256]
LARGE_PAGE_COUNTS = [1024, 8192]
POOL_PAGES = 2 * max(LARGE_PAGE_COUNTS)  # pages per buffer: fragmented pages have gaps
# Elements of a token in each component: of NPU pools, and of other pools (`MLA`).
NPU_MLA = {"k": 512, "v": 64}
NPU_INDEXED_MLA = {**NPU_MLA, "index_k": 128}
MLA = {"kv": 576}
# Pages per contiguous run on both sides; None: all pages in one run.
FRAGMENTS = {"contiguous": None, "half": 2, "full": 1}
ROW_SECONDS = 0.6  # of timing per row, within these numbers of repeats of each side
MIN_REPEATS, MAX_REPEATS = 7, 300
# For cases without a target: not slower. Medians of the same code differ by up to a tenth here,
# because other machines share the memory.
MIN_SPEEDUP = 0.9
# (kind, pages, fragmented, figure): least speed relative to stock's.
TARGETS = {
    ("MLA k v index_k, Ascend", 1024, "full", "arrays"): 25.0,
    ("MLA k v index_k, Ascend", 1024, "full", "ours"): 6.0,
    **{
        ("Windows, pages of 1, NIXL", bench_windows.WINDOW, fragments, "ours"): 0.95
        for fragments in FRAGMENTS
    },
}


class FakeTransport:
    """A fake transfer engine and NIXL agent; with ``keep`` it records the copies."""

    def __init__(self, keep: bool = False):
        self.keep = keep
        self.copies: list[np.ndarray] = []

    def batch_transfer_sync(self, session, src, dst, lengths) -> int:
        if self.keep:
            self.copies.append(np.array([src, dst, lengths]))
        return 0

    def get_xfer_descs(self, rows, kind):
        return rows

    def prep_xfer_dlist(self, peer, runs, kind):
        return runs

    def make_prepped_xfer(self, operation, src, src_blocks, dst, dst_blocks) -> int:
        if self.keep:
            sides = ((src, src_blocks), (dst, dst_blocks))
            descriptors = (bench_0_5_23.descriptors(*side) for side in sides)
            self.initialize_xfer(operation, *descriptors, PEER)
        return 1

    def initialize_xfer(self, operation, src, dst, peer, notif=b"") -> int:
        if self.keep:
            if not np.array_equal(src[:, 1:], dst[:, 1:]):  # bytes, and device 0 on both sides
                raise ValueError("source and destination descriptors differ in length or device")
            self.copies.append(np.array([src[:, 0], dst[:, 0], src[:, 1]]))
        return 1

    def transfer(self, handle) -> str:
        return "DONE"


@dataclasses.dataclass(frozen=True)
class TransferCase:
    """A pool, a backend, and both sides' manager classes; `later` is for releases after 0.5.9."""

    name: str
    stock: type
    ours: type
    own: object  # `RankLayout` of the prefill rank
    peer: object  # `RankLayout` of the decode rank
    sliced: bool  # stock sends by head slices
    lists: bool  # the transport takes lists, not arrays
    later: bool = False
    held: int = POOL_PAGES  # pages per buffer

    def transport(self):
        """The transport of a timed call."""
        return FakeTransport()

    def addresses(self, layout, side: int) -> tuple[list[int], ...]:
        """Addresses of the KV buffers, and of the state buffers if there are any."""
        return (pointers(layout, side),)

    def make_call(self, manager_class: type, transport: FakeTransport) -> Callable:
        """A function `(src_pages, dst_pages)` that makes the engine's call on such a manager."""
        manager = self._manager(manager_class, transport)
        (dst, *_), page_bytes = self.addresses(self.peer, 2), self.peer.kv[0].page_bytes
        sliced = self.sliced and hasattr(manager, "send_kvcache_slice")  # ours has one method
        if self.lists:
            executor = ThreadPoolExecutor(1)  # as in the engine on hosts with fewer than 128 cores
            tail = (self.peer.tp_rank, self.peer.tp_size, page_bytes) if sliced else ()
            tail = (*tail, executor)
        elif self.later:
            tail = (0,)
        else:
            sizes = (self.own.tp_size, self.peer.tp_size, self.peer.tp_rank, page_bytes)
            tail = (0, NOTIFICATION, *(sizes if sliced else ()))
        send = manager.send_kvcache_slice if sliced else manager.send_kvcache
        if self.later and not self.lists:
            notices = bench_0_5_23.notices(send, NOTIFICATION)
            if sliced:
                return lambda src_pages, dst_pages: send(PEER, src_pages, dst_pages, *notices)
            tail = (*tail, *notices)
        return lambda src_pages, dst_pages: send(PEER, src_pages, dst, dst_pages, *tail)

    def _manager(self, manager_class: type, transport: FakeTransport):
        """A manager with only the attributes that the call reads."""
        own = self.own
        manager = manager_class.__new__(manager_class)
        manager.agent = manager.engine = transport
        manager.request_status = {1: 2}  # the notification's room waits for KV
        manager.attn_tp_size = own.tp_size
        manager.is_mla_backend = own.kv[0].heads is None
        manager.enable_custom_mem_pool = False
        manager.kv_args = SimpleNamespace(
            engine_rank=own.tp_rank,
            kv_data_ptrs=self.addresses(own, 1)[0],
            kv_item_lens=[buffer.page_bytes for buffer in own.kv],
            kv_head_num=own.kv[0].heads and own.kv[0].heads.count,
            page_size=own.page_size,
            prefill_start_layer=0,
            gpu_id=0,
            layout=own,
        )
        dst = self.addresses(self.peer, 2)[0]
        info = SimpleNamespace(
            plan=self.plan(), refusal="", agent_name=PEER, gpu_id=0, dst_kv_ptrs=dst
        )
        manager.decode_kv_args_table = {PEER: info}
        if self.later:
            bench_0_5_23.complete_manager(manager, info, own, self.peer, self.held)
        return manager

    def plan(self):
        """Our transfer plan for this pair of ranks, as made when decode registers."""
        kv_layout = sys.modules[f"{ENGINE}.kv_layout"]
        own, peer = (
            kv_layout.Pointers(*self.addresses(layout, side))
            for side, layout in enumerate((self.own, self.peer), 1)
        )
        return kv_layout.plan_for_peer(self.own, own, self.peer, peer)


class WindowCase(TransferCase):
    """A transfer of a request's sliding-window state; timed calls use the real NIXL."""

    def transport(self):
        return bench_windows.NixlAgents(self.own, self.peer, PEER)

    def addresses(self, layout, side: int) -> tuple[list[int], ...]:
        return bench_windows.memory(layout, side)[1:]

    def make_call(self, manager_class: type, transport) -> Callable:
        manager = self._manager(manager_class, transport)
        info = manager.decode_kv_args_table[PEER]
        bench_windows.add_state(manager, info, self.own, self.peer, self.later)
        return bench_windows.make_state_call(manager, info, PEER, NOTIFICATION, self.later)


def window_case(page_size: int, **more) -> WindowCase:
    pool = bench_windows.layout(sys.modules[f"{ENGINE}.kv_layout"], page_size)
    held = 2 * bench_windows.held(page_size)
    name = f"Windows, pages of {page_size}, NIXL"
    return WindowCase(name, held=held, **more, **between_equal_ranks(pool))


def pointers(layout, side: int) -> list[int]:
    """Invented addresses of a side's KV buffers, far enough apart for any pool."""
    return [(side << 50) + (i << 40) for i in range(len(layout.kv))]


def manager_classes() -> dict[str, dict[str, type]]:
    """Each backend's KV manager, stock and ours; this process imports the stock engine.

    Raises:
        FileNotFoundError: The patched engine does not exist.
    """
    if LATER:
        bench_0_5_23.publish_defaults()
    found = {name: {"stock": manager(name)} for name in BACKENDS}
    patched = next(PATCHED.glob("lib/python*/site-packages/sglang/srt/disaggregation"), None)
    if patched is None:
        raise FileNotFoundError(f"no engine in {PATCHED}: run scripts/setup.sh")
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{ENGINE}.")]:
        bench_0_5_23.forget_metrics(sys.modules.pop(name))
    sys.modules[ENGINE] = package = ModuleType(ENGINE)
    package.__path__ = [str(patched)]
    for name in BACKENDS:
        found[name]["ours"] = manager(name)
    return found


def manager(backend: str) -> type:
    return getattr(importlib.import_module(f"{ENGINE}.{backend}.conn"), BACKENDS[backend])


def transfer_cases() -> list[TransferCase]:
    """All cases of this release."""
    found = manager_classes()
    ascend, mooncake, nixl = (
        {**found[name], "lists": name != "nixl", "later": LATER} for name in BACKENDS
    )
    plain, indexed, mla_kv = (
        between_equal_ranks(mla(widths)) for widths in (NPU_MLA, NPU_INDEXED_MLA, MLA)
    )
    gathered = {"own": gqa(1, 2), "peer": gqa(0, 1), "sliced": True}
    spread = {"own": gqa(0, 1), "peer": gqa(1, 2), "sliced": True}
    state = [window_case(page_size, **nixl) for page_size in bench_windows.PAGE_SIZES]
    if LATER:
        return [
            TransferCase("MLA k v index_k, Ascend", **ascend, **indexed),
            TransferCase("MLA, Mooncake", **mooncake, **mla_kv),
            TransferCase("GQA, Mooncake", **mooncake, **between_equal_ranks(gqa(0, 1))),
            TransferCase("GQA TP 2 to 1, Mooncake", **mooncake, **gathered),
            TransferCase("MLA, NIXL", **nixl, **mla_kv),
            TransferCase("GQA TP 2 to 1, NIXL", **nixl, **gathered),
            TransferCase("GQA TP 1 to 2, NIXL", **nixl, **spread),
            *state,
        ]
    return [
        TransferCase("MLA k v, Ascend", **ascend, **plain),
        TransferCase("MLA k v index_k, Ascend", **ascend, **indexed),
        TransferCase("MLA k v index_k, NIXL", **nixl, **indexed),
        TransferCase("GQA TP 2 to 1, Mooncake", **mooncake, **gathered),
        TransferCase("GQA TP 2 to 1, NIXL", **nixl, **gathered),
        *state,
    ]


def between_equal_ranks(pool) -> dict:
    """Options of a case between two ranks with the same layout."""
    return {"own": pool, "peer": pool, "sliced": False}


def rank(tp: tuple[int, int], layers: int, widths: dict[str, int], heads=None):
    """A TP rank's layout; ``widths`` are elements of a token in each component of a layer."""
    kv_layout = sys.modules[f"{ENGINE}.kv_layout"]
    kv = tuple(
        kv_layout.Buffer(component, False, layer, PAGE_SIZE * width * ELEMENT, heads)
        for component, width in widths.items()
        for layer in range(layers)
    )
    return kv_layout.RankLayout(*tp, 0, 1, PAGE_SIZE, "bfloat16", "VRAM", layers, kv)


def mla(widths: dict[str, int]):
    """Layout of DeepSeek V3's 61 layers, or V3.2's with index keys."""
    return rank((0, 1), 61, widths)


def gqa(tp_rank: int, tp_size: int):
    """A TP rank's layout of 64 layers with 8 KV heads of 128 elements."""
    held = 8 // tp_size
    first = tp_rank * held
    heads = sys.modules[f"{ENGINE}.kv_layout"].Heads(first, first + held, 8)
    return rank((tp_rank, tp_size), 64, dict.fromkeys("kv", held * 128), heads)


def make_pages(count: int, fragments: str, seed: int) -> np.ndarray:
    """`count` pages in runs of the length that `fragments` names; int32, as in the engine."""
    run = FRAGMENTS[fragments] or count
    starts = np.random.default_rng(seed).permutation(-(-count // run)) * (run + 1)
    return (starts[:, None] + np.arange(run)).reshape(-1)[:count].astype(np.int32)


def row_parameters(every: list[TransferCase]) -> Iterator[tuple[TransferCase, int, str]]:
    """Case, pages and fragmentation of each row."""
    for kind in every:
        if isinstance(kind, WindowCase):
            yield from ((kind, kind.held // 2, fragments) for fragments in FRAGMENTS)
            continue
        for count in PAGE_COUNTS if kind.sliced else PAGE_COUNTS + LARGE_PAGE_COUNTS:
            if kind.sliced or count == 1:  # slices are copied token by token in any case
                wanted = ["full"]
            else:
                wanted = FRAGMENTS if count in LARGE_PAGE_COUNTS else ["contiguous", "full"]
            for fragments in wanted:
                yield kind, count, fragments


def canonical_copies(copies: list[np.ndarray]) -> np.ndarray:
    """`[3, n]` of source, destination, bytes: sorted by source, adjacent copies merged."""
    src, dst, length = np.concatenate([np.empty((3, 0), np.int64), *copies], axis=1)
    order = np.lexsort((dst, src))
    src, dst, length = src[order], dst[order], length[order]
    apart = (np.diff(src) != length[:-1]) | (np.diff(dst) != length[:-1])
    first = np.flatnonzero(np.concatenate((np.full(min(1, src.size), True), apart)))
    total = np.add.reduceat(length, first) if src.size else length
    return np.array([src[first], dst[first], total])


def check(kind: TransferCase, src: np.ndarray, dst: np.ndarray) -> int:
    """Check that both sides copy the same bytes; returns how many copies ours makes.

    Raises:
        ValueError: They do not copy the same bytes to the same places.
    """
    kept = {}
    for side in (kind.stock, kind.ours):
        transport = FakeTransport(keep=True)
        kind.make_call(side, transport)(src, dst)
        kept[side] = transport.copies
    if not np.array_equal(canonical_copies(kept[kind.stock]), canonical_copies(kept[kind.ours])):
        raise ValueError(f"{kind.name}, {src.size} pages: stock and patched copy different bytes")
    return sum(part.shape[1] for part in kept[kind.ours])


def check_packed() -> None:
    """Check that packed and sliced heads carry the same number of bytes. Raises as `check`."""
    kv_layout = sys.modules[f"{ENGINE}.kv_layout"]
    for direction, page_size, count in itertools.product(
        bench_packed.DIRECTIONS, bench_packed.PAGE_SIZES, CHECKED_PAGES
    ):
        plans = bench_packed.make_plans(kv_layout, direction, page_size)
        for is_scattered in (False, True):
            pages = (bench_packed.make_pages(count, is_scattered, seed) for seed in (1, 2))
            bench_packed.check(plans, *pages)


def peak_mb(side: Callable) -> float:
    """Peak memory of one call, in 10^6 bytes, including NumPy's."""
    tracemalloc.start()
    side()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def measure(kind: TransferCase, count: int, fragments: str) -> dict:
    """One row of the table."""
    src, dst = (make_pages(count, fragments, seed) for seed in (1, 2))
    copies = check(kind, src, dst)
    calls = {
        "stock": kind.make_call(kind.stock, kind.transport()),
        "ours": kind.make_call(kind.ours, kind.transport()),
    }
    if kind.lists and not kind.sliced:
        plan = kind.plan().kv
        calls["arrays"] = lambda src, dst: plan.copies(src, dst).arrays()
    sides = {name: lambda call=call: call(src, dst) for name, call in calls.items()}
    # Processor time is less noisy than wall time; neither side has two threads that compute.
    once = sum(medians(sides, 3, time.process_time).values())  # also warms up
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(ROW_SECONDS / once)))
    times = medians(sides, repeats, time.process_time)
    return {
        "kind": kind.name,
        "pages": count,
        "fragmented": fragments,
        "copies": copies,
        "repeats": repeats,
        "ms": {name: value * 1e3 for name, value in times.items()},
        "peak_mb": {name: peak_mb(side) for name, side in sides.items()},
        "faster": {name: times["stock"] / times[name] for name in times if name != "stock"},
    }


def regressions(rows: list[dict]) -> list[str]:
    """A sentence for each figure that misses its target."""
    found = []
    for row in rows:
        case = (row["kind"], row["pages"], row["fragmented"])
        for figure, faster in row["faster"].items():
            wanted = TARGETS.get((*case, figure), MIN_SPEEDUP)
            if faster < wanted:
                found.append(
                    f"{case[0]}, {case[1]} pages, {case[2]}: {figure} {faster:.2f} times "
                    f"as fast as stock, target {wanted:g}"
                )
    return found


def main(
    json_file: JsonFile = None,
    only_check: Annotated[
        bool, typer.Option("--check", help="Only compare what both engines copy, at small sizes.")
    ] = False,
) -> None:
    """Time both sides; status 1 if ours is a tenth slower anywhere or misses a target."""
    every = transfer_cases()
    if only_check:
        for kind, count, fragments in itertools.product(every, CHECKED_PAGES, FRAGMENTS):
            check(kind, *(make_pages(count, fragments, seed) for seed in (1, 2)))
        check_packed()
        console().print(f"{len(every)} kinds of transfer: stock and patched copy the same bytes")
        return
    gc.disable()  # it would slow stock most, since it scans stock's tuples
    rows = []
    for case in row_parameters(every):
        row = measure(*case)
        if regressions([row]):  # repeat, since the machine may have been busy
            row = measure(*case)
        rows.append(row)
        gc.collect()
    packed = bench_packed.rows(sys.modules[f"{ENGINE}.kv_layout"])
    show("Planning one transfer: medians, stock and patched in turns", PLAN, rows)
    show("Planning KV heads between TP sizes: medians, in turns", PLAN_PACKED, packed)
    missed = regressions(rows) + bench_packed.misses(packed)
    finish({"rows": rows, "packed": packed, "missed": missed}, json_file)


if __name__ == "__main__":
    typer.run(main)
