"""Views of the engine's pools, and whether a rank sends and reads head slices as whole rows."""

import engine_calls
import head_pools
import pytest
import torch
from engine_calls import by_kind
from engine_release import SINCE_0_5_18
from msgspec.structs import replace
from sglang.srt.disaggregation.kv_layout import LayoutError
from sglang.srt.disaggregation.pd import pool_views
from sglang.srt.disaggregation.pd.packed_mode import is_packed_mode, read_packing_bytes
from sglang.srt.disaggregation.pd.pool_views import buffer_views, find_views, set_views
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pd_harness.parallel_context import single_rank_context

pytestmark = pytest.mark.engine

PACKED, MEMORY, TILED = "SGLANG_PD_PACKED", "SGLANG_PD_PACKING_MIB", "SGLANG_USE_FIA_NZ"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (PACKED, MEMORY, TILED):
        monkeypatch.delenv(name, raising=False)


def window_pool() -> SWAKVPool:
    more = {} if SINCE_0_5_18 else {"enable_kvcache_transpose": False}
    with single_rank_context():
        return SWAKVPool(
            size=32,
            size_swa=16,
            page_size=4,
            dtype=torch.float32,
            head_num=2,
            head_dim=4,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1, 3],
            device="cpu",
            **more,
        )


def assert_views_lie_in_the_pool(pool, infos) -> None:
    """Checks the views of what a pool reports: pointers, lengths and bytes per page."""
    ptrs, lens, sizes = infos
    layout = head_pools.rank_args(0, 1).layout
    buffers = [replace(layout.kv[0], page_bytes=size) for size in sizes]
    views = buffer_views(buffers, [None, pool], ptrs, lens)
    assert [view.data_ptr() for view in views] == ptrs
    shapes = [(length // size, size) for length, size in zip(lens, sizes, strict=True)]
    assert [tuple(view.shape) for view in views] == shapes
    assert {view.dtype for view in views} == {torch.uint8}


@pytest.mark.parametrize("kind", engine_calls.POOLS)
@pytest.mark.parametrize("start_layer", [0, 3])
def test_npu_pools_are_viewed_where_they_lie(kind, start_layer):
    pool = engine_calls.POOLS[kind](16, start_layer)
    assert_views_lie_in_the_pool(pool, pool.get_contiguous_buf_infos())


def test_sliding_windows_are_viewed_where_they_lie():
    pool = window_pool()
    assert_views_lie_in_the_pool(pool, pool.get_contiguous_buf_infos())
    assert_views_lie_in_the_pool(pool, pool.get_state_buf_infos())


def test_kv_and_state_are_viewed_apart():
    args = head_pools.rank_args(1, 2)
    kv, windows = args.pools
    found = find_views(args, args.pools)
    for views, pool in ((found.kv, kv), (found.state, windows)):
        buffers = [*pool.k_buffer, *pool.v_buffer]
        assert [view.data_ptr() for view in views] == [one.data_ptr() for one in buffers]
        views[1][3, -1] ^= 255
        changed = pool.k_buffer[1].view(torch.uint8).view(len(views[1]), -1)
        assert torch.equal(changed, views[1])


def test_state_without_description_is_not_viewed():
    """Such as recurrent state, which the engine sends."""
    args = head_pools.rank_args(0, 1)
    args.layout = replace(args.layout, state=())
    assert find_views(args, args.pools).state == []


@pytest.mark.parametrize(
    "variables, is_able, whole_rows",
    [
        ({}, True, True),
        ({PACKED: ""}, True, True),
        ({PACKED: "1", TILED: "0"}, True, True),
        ({PACKED: "0"}, True, False),
        ({TILED: "1"}, True, False),
        ({TILED: "True"}, True, False),
        ({}, False, False),  # the engine's staging buffers
    ],
    ids=str,
)
def test_rank_announces_whole_rows_unless_it_may_not(monkeypatch, variables, is_able, whole_rows):
    """Otherwise nobody searches its pools' tensors."""
    args = head_pools.rank_args(0, 1)
    args.layout, args.views = replace(args.layout, whole_rows=not whole_rows), None
    for variable in variables.items():
        monkeypatch.setenv(*variable)
    set_views(args, args.pools, is_able)
    assert args.layout.whole_rows == (args.views is not None) == whole_rows
    if whole_rows:
        assert len(args.views.kv) == len(args.views.state) == 4


def test_rank_of_mla_does_not_announce_whole_rows():
    args = head_pools.rank_args(0, 1)
    opaque = tuple(replace(buffer, heads=None) for buffer in args.layout.kv)
    args.layout = replace(args.layout, kv=opaque)
    set_views(args, args.pools)
    assert not args.layout.whole_rows and args.views is None


@pytest.mark.parametrize("what", ["kv", "state"])
def test_rank_whose_buffers_are_not_found_sends_slices(caplog, what):
    """Of pools that hide their tensors, or that the patch set does not know."""
    caplog.set_level("INFO")
    args, elsewhere = head_pools.rank_args(0, 1), torch.zeros(4096, dtype=torch.uint8)
    if what == "kv":
        args.kv_data_ptrs = [*args.kv_data_ptrs[:-1], elsewhere.data_ptr()]
    else:
        args.state_data_ptrs = by_kind([elsewhere.data_ptr()] * 4)
    set_views(args, args.pools)
    assert args.views is None and not args.layout.whole_rows
    assert "token by token" in caplog.text and "no tensor of the pools contains" in caplog.text
    with pytest.raises(LayoutError, match="no tensor of the pools contains"):
        find_views(args, args.pools)


def test_rank_whose_pools_cannot_be_searched_sends_slices(monkeypatch, caplog):
    """Such as a proxy of a tensor that is gone: the engine would have started."""

    def fail(*_):
        raise ReferenceError("injected")

    monkeypatch.setattr(pool_views, "find_views", fail)
    args = head_pools.rank_args(0, 1)
    set_views(args, args.pools)
    assert args.views is None and not args.layout.whole_rows
    (warning,) = (one for one in caplog.records if one.levelname == "WARNING")
    assert "token by token" in warning.message and "injected" in warning.message


@pytest.mark.parametrize("value", ["yes", "2", "true"])
def test_unknown_mode_stops_the_server(monkeypatch, value):
    """Not only where KV is split by heads: the next model may be."""
    monkeypatch.setenv(PACKED, value)
    with pytest.raises(ValueError, match=f"{PACKED} is '{value}'; expected 1 or 0"):
        is_packed_mode()
    args = head_pools.rank_args(0, 1)
    with pytest.raises(ValueError, match=PACKED):
        set_views(args, args.pools, is_able=False)


@pytest.mark.parametrize(
    "value, mib", [(None, 128), ("", 128), ("0", 0), ("0.5", 0), ("16", 16), ("16.9", 16)]
)
def test_size_of_the_packing_buffer(monkeypatch, value, mib):
    if value is not None:
        monkeypatch.setenv(MEMORY, value)
    assert read_packing_bytes() == mib << 20


@pytest.mark.parametrize("value", ["much", "-1", "nan", "inf"])
def test_impossible_size_of_the_packing_buffer_is_refused(monkeypatch, value):
    monkeypatch.setenv(MEMORY, value)
    with pytest.raises(ValueError, match=f"{MEMORY} is '{value}'; expected 0 MiB or more"):
        read_packing_bytes()
