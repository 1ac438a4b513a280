"""The benchmark compares equal work, and reports a speedup below its target."""

import subprocess
import sys
from pathlib import Path

import bench_packed
import bench_plan as bench
import kv_layout
import numpy as np
import pytest

from pd_harness.releases import release

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "scripts" / "bench.sh"


@pytest.fixture
def fake_engine(monkeypatch):
    """Lets the benchmark import `kv_layout` from where the engine has it."""
    monkeypatch.setitem(sys.modules, f"{bench.ENGINE}.kv_layout", kv_layout)


def copies(*rows):
    return [np.array(rows).T]


def test_equal_copies_in_other_order_compare_equal():
    one = bench.canonical_copies(copies((0, 100, 8), (8, 108, 8), (32, 0, 4)))
    other = bench.canonical_copies(
        [*copies((32, 0, 2)), *copies((34, 2, 2)), *copies((0, 100, 16))]
    )
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one, [[0, 32], [100, 0], [16, 4]])
    assert bench.canonical_copies([]).shape == (3, 0)


@pytest.mark.parametrize("wrong", [(8, 109, 8), (9, 108, 8), (8, 108, 7)])
def test_copies_of_other_bytes_compare_unequal(wrong):
    right = bench.canonical_copies(copies((0, 100, 8), (8, 108, 8)))
    assert not np.array_equal(right, bench.canonical_copies(copies((0, 100, 8), wrong)))


class PlanSender:
    """Sends by transfer plan, as in the benchmark's cases, but with copies in reverse order."""

    offset = 0

    def send_kvcache(self, peer, src, dst_pointers, dst, executor):
        plan = self.decode_kv_args_table[peer].plan.kv
        at, to, size = (column[::-1] for column in plan.copies(src, dst).lists())
        return self.engine.batch_transfer_sync(peer, at, [byte + self.offset for byte in to], size)


class OffByOneByteSender(PlanSender):
    offset = 1


class BlockSender:
    """Sends like NIXL in later releases: by numbers of blocks that the agent knows."""

    offset = 0

    def _prepare_payload_xfer(self, info):
        self.prepared = kv_layout.prepare(info.plan.kv, self._num_slots_src, info.dst_num_slots)
        self.lists = [
            self.agent.prep_xfer_dlist("", self.packed(side), "VRAM")
            for side in (self.prepared.src, self.prepared.dst)
        ]

    def packed(self, runs):
        return np.array([(at, size, 0, step, n) for at, size, step, n in runs], dtype=np.uint64)

    def send_kvcache(self, peer, src, dst_pointers, dst, gpu_id):
        return self.send_kvcache_slice(peer, src, dst)

    def send_kvcache_slice(self, peer, src, dst):
        src, dst = self.prepared.blocks(src, dst)
        ours, theirs = self.lists
        return self.agent.make_prepped_xfer("WRITE", ours, src, theirs, dst + self.offset)


class OffByOneBlockSender(BlockSender):
    offset = 1


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("fragments", ["contiguous", "half", "full"])
def test_bench_check_detects_other_bytes(fake_engine, count, fragments):
    pool = bench.mla(bench.NPU_INDEXED_MLA)
    pages = [bench.make_pages(count, fragments, seed) for seed in (1, 2)]
    how = {"own": pool, "peer": pool, "sliced": False, "lists": True}
    runs = -(-count // (bench.FRAGMENTS[fragments] or count))
    equal = bench.TransferCase("k", PlanSender, PlanSender, **how)
    assert bench.check(equal, *pages) == 183 * runs
    with pytest.raises(ValueError, match="copy different bytes"):
        bench.check(bench.TransferCase("k", PlanSender, OffByOneByteSender, **how), *pages)


@pytest.mark.parametrize("tp", [((0, 1), (0, 1)), ((1, 2), (0, 1)), ((0, 1), (1, 2))])
def test_bench_check_detects_other_blocks(fake_engine, tp):
    own, peer = (bench.gqa(*side) for side in tp)
    pages = [bench.make_pages(3, "half", seed) for seed in (1, 2)]
    how = {"own": own, "peer": peer, "sliced": own != peer, "lists": False, "later": True}
    blocks = 3 * 128 * (bench.PAGE_SIZE if own != peer else 1)
    assert bench.check(bench.TransferCase("k", BlockSender, BlockSender, **how), *pages) == blocks
    with pytest.raises(ValueError, match="copy different bytes"):
        bench.check(bench.TransferCase("k", BlockSender, OffByOneBlockSender, **how), *pages)


def test_descriptors_look_up_blocks_in_runs():
    runs = np.array([(100, 8, 0, 10, 2), (500, 4, 1, 4, 3)], dtype=np.uint64)
    found = bench.bench_0_5_23.descriptors(runs, np.array([4, 0, 2, 1], dtype=np.int32))
    assert found.tolist() == [[508, 4, 1], [100, 8, 0], [500, 4, 1], [110, 8, 0]]
    for outside in (5, -1):
        with pytest.raises(IndexError, match="of 5"):
            bench.bench_0_5_23.descriptors(runs, np.array([0, outside], dtype=np.int32))


def test_speedup_below_target_is_reported():
    row = {"kind": "MLA k v index_k, Ascend", "pages": 1024, "fragmented": "full"}
    assert bench.regressions([{**row, "faster": {"ours": 6.0, "arrays": 25.0}}]) == []
    missed = bench.regressions([{**row, "faster": {"ours": 5.9, "arrays": 24.0}}])
    assert ["ours 5.90" in missed[0], "arrays 24.00" in missed[1]] == [True, True]
    assert bench.regressions([{**row, "pages": 1, "faster": {"ours": 1.01, "arrays": 1.0}}]) == []
    assert "1 pages" in bench.regressions([{**row, "pages": 1, "faster": {"ours": 0.8}}])[0]


@pytest.mark.parametrize("direction", bench_packed.DIRECTIONS)
def test_packed_and_sliced_heads_carry_the_same_bytes(direction):
    plans = bench_packed.make_plans(kv_layout, direction, page_size=16)
    pages = [bench_packed.make_pages(5, is_scattered=True, seed=seed) for seed in (1, 2)]
    buffers = 2 * bench_packed.LAYERS
    wanted = {"packed": 5 * buffers, "sliced": 5 * 16 * buffers, "whole pages": 5 * buffers}
    assert bench_packed.check(plans, *pages) == wanted


def test_slow_planning_of_packed_heads_is_reported():
    row = {"direction": "TP 2 to 1", "pages": 8192, "page_size": 1, "lie": "in a row"}

    def misses(packed: float, whole: float, **more) -> list[str]:
        ms = {"packed": packed, "whole pages": whole}
        return bench_packed.misses([{**row, "ms": ms, **more}])

    assert misses(4.9, 3.5) == misses(0.9, 0.1) == misses(50, 35, lie="scattered") == []
    assert "5.1 ms, goal 5" in misses(5.1, 5.0)[0]
    assert "whole pages in 30.0 ms, goal 1.5 times that" in misses(46, 30, lie="scattered")[0]


@pytest.mark.parametrize(
    "missed, ms, more",
    [
        ("", {}, {}),
        ("flat 70 ms: 0.69, goal 0.7", {"packed": 101}, {}),
        ("", {"packed": 101}, {"direction": "TP 1 to 2", "copy ms": 90.0}),
        ("goal 0.7", {"packed": 120}, {"direction": "TP 1 to 2", "copy ms": 90.0}),
        ("", {"packed": 139}, {"lie": "scattered"}),
        ("flat 70 ms: 0.50, goal 0.5", {"packed": 141}, {"lie": "scattered"}),
        ("", {"packed": 141}, {"lie": "scattered", "page_size": 1}),
        ("", {"packed": 141, "whole": 100}, {"transport": "TCP"}),
        ("whole 90 ms: 0.64, goal 0.7", {"packed": 141, "whole": 90}, {"transport": "TCP"}),
        ("sliced 100 ms: 0.83, goal 0.9", {"packed": 120, "sliced": 100, "flat": 90}, {}),
    ],
)
def test_slow_writes_of_packed_heads_are_reported(missed, ms, more):
    row = {"transport": "shared memory", "direction": "TP 2 to 1", "page_size": 16}
    row |= {"lie": "in a row", "copy ms": 10.0, **more}
    row["ms"] = {"flat": 70, "whole": 70, "packed": 99, "sliced": 900, **ms}
    found = bench_packed.wire_misses([row])
    assert (len(found), missed in "".join(found)) == (bool(missed), True), found


@pytest.mark.engine
@pytest.mark.nightly
def test_stock_and_patched_copy_the_same_bytes():
    """Runs the real stock managers and the patched ones in the stock environment."""
    if not (ROOT / ".pd-env" / release() / "stock" / ".ready").exists():
        pytest.skip("no stock engine in .pd-env: scripts/setup.sh makes it")
    found = subprocess.run([BENCH, "plan", "--check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "copy the same bytes" in found.stdout
