"""The layout that a rank describes when it registers, and what it leaves to the engine."""

from types import SimpleNamespace

import pytest
import torch
from engine_calls import kv_buffer_infos
from engine_release import IS_0_5_18
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.kv_layout import HIDDEN_STATES, Heads
from sglang.srt.disaggregation.pd import local_layout
from sglang.srt.disaggregation.pd.packing import make_packing_buffers
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pd_harness.parallel_context import single_rank_context

pytestmark = pytest.mark.engine

PAGE, LAYERS, ROWS, SLOTS = 4, 3, 10, 16
# A variable with which a server has further metadata rows.
MORE_ROWS = (
    "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS"
    if IS_0_5_18
    else "SGLANG_ENABLE_DISAGG_SAMPLING_MASK"
)
SIZES = {"size": 4 * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu"}
HEADS = {"head_num": 1, "head_dim": 8, "enable_memory_saver": False}


def mha(layers: int = LAYERS) -> MHATokenToKVPool:
    with single_rank_context():
        return MHATokenToKVPool(**SIZES, **HEADS, layer_num=layers)


def swa_pool() -> SWAKVPool:
    layers = {"full_attention_layer_ids": [0], "swa_attention_layer_ids": [1, 2]}
    with single_rank_context():
        return SWAKVPool(
            **SIZES, **HEADS, **layers, size_swa=2 * PAGE, token_to_kv_pool_class=MHATokenToKVPool
        )


def registered_args(target, draft=None, **more) -> KVArgs:
    """The KVArgs of a rank that has registered these pools."""
    made = KVArgs()
    infos = [kv_buffer_infos(pool) for pool in (target, draft) if pool is not None]
    made.kv_data_ptrs, made.kv_data_lens, made.kv_item_lens = (
        sum(part, []) for part in zip(*infos)
    )
    has_windows = hasattr(target, "swa_kv_pool")
    pointers, lengths, items = target.get_state_buf_infos() if has_windows else ([], [], [])
    facts = {
        "kv_layer_ids": [],
        "mla_compression_ratios": None,
        "num_draft_entries": 0 if draft is None else len(infos[1][0]),
        "state_types": [StateType.SWA] * has_windows,
        "state_data_ptrs": [pointers] * has_windows,
        "state_data_lens": [lengths] * has_windows,
        "state_item_lens": [items] * has_windows,
        "swa_kv_cache_layout": None,
        "aux_item_lens": [64] * ROWS,
        "aux_data_lens": [64 * SLOTS] * ROWS,
        "pp_rank": 0,
        "page_size": PAGE,
        "kv_cache_dtype_str": "bfloat16",
    }
    for name, value in {**facts, **more}.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def described_args(monkeypatch):
    """A function from pools to the KVArgs of the first of two TP ranks, with their layout."""
    parallel = {"attn_tp_rank": 0, "attn_tp_size": 2, "pp_size": 1, "attn_cp_size": 1}
    parallel |= {"attn_dcp_size": 1, "enable_kv_cache_sharding": False}
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 2, get_swa_num_kv_heads=lambda ranks: 1)
    draft_model = SimpleNamespace(get_total_num_kv_heads=lambda: 1)
    runner = SimpleNamespace(model_config=draft_model)
    worker = SimpleNamespace(_draft_model_runners=lambda: [runner])

    def described(
        target,
        draft=None,
        ranks=(),
        memory=False,
        scheduler=(),
        is_registered=True,
        backend="nixl",
        **more,
    ):
        disagg = SimpleNamespace(disaggregation_transfer_backend=backend)
        monkeypatch.setattr(local_layout, "get_disagg", lambda: disagg)
        ranks = SimpleNamespace(**{**parallel, **dict(ranks)})
        monkeypatch.setattr(local_layout, "get_parallel", lambda: ranks)
        unified = SimpleNamespace(enable_unified_memory=memory)
        monkeypatch.setattr(local_layout, "get_memory", lambda: unified)
        args = registered_args(target, draft if is_registered else None, **more)
        facts = {"model_config": model, "draft_worker": worker, **dict(scheduler)}
        with local_layout.scheduler_context(SimpleNamespace(**facts)):
            local_layout.set_local_layout(args, target, draft, LAYERS)
        return args

    return described


@pytest.fixture
def layout(described_args):
    """A function from pools to the first of two TP ranks' layout; None leaves it to the engine."""
    return lambda *pools, **more: described_args(*pools, **more).layout


def test_layout_of_the_first_of_two_tp_ranks(layout):
    found = layout(mha())
    assert (found.tp_rank, found.tp_size, found.total_layers) == (0, 2, LAYERS)
    assert [(b.component, b.layer) for b in found.kv] == [(c, n) for c in "kv" for n in range(3)]
    assert all(buffer.heads == Heads(0, 1, 2) for buffer in found.kv)
    assert (found.aux, found.aux_slots, found.state) == ((64,) * ROWS, SLOTS, ())


UNSUPPORTED = {
    "layer ids": {"kv_layer_ids": [0, 1, 2]},
    "compressed": {"mla_compression_ratios": [1]},
    "sharded": {"ranks": {"enable_kv_cache_sharding": True}},
    "context parallelism": {"ranks": {"attn_cp_size": 2}},
    "decode's context parallelism": {"ranks": {"attn_dcp_size": 2}},
    "unified memory": {"memory": True},
    "HiSparse": {"scheduler": {"enable_hisparse": True}},
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_features_are_left_to_the_engine(case, layout):
    assert layout(mha(), **UNSUPPORTED[case]) is None


def test_no_layout_outside_of_the_scheduler_context(layout):
    layout(mha())
    args = registered_args(mha())
    local_layout.set_local_layout(args, mha(), None, LAYERS)
    assert args.layout is None


def test_draft_has_its_own_kv_heads(layout):
    """The draft has one, which both ranks hold; the target has two."""
    found = layout(mha(), mha(1))
    assert [buffer.heads for buffer in found.kv if buffer.draft] == [Heads(0, 1, 1)] * 2


def test_unregistered_draft_is_not_described(layout):
    found = layout(mha(), mha(1), is_registered=False)
    assert len(found.kv) == 2 * LAYERS and not any(buffer.draft for buffer in found.kv)


@pytest.mark.parametrize("where", [None, "nhd"])
def test_windows_are_sent_by_plan(where, layout):
    found = layout(swa_pool(), swa_kv_cache_layout=where)
    assert [(b.component, b.layer) for b in found.state] == [
        (component, layer) for component in ("swa_k", "swa_v") for layer in (1, 2)
    ]
    # The model has one head in these layers, which both ranks hold.
    assert {buffer.heads for buffer in found.state} == {Heads(0, 1, 1)}


def test_windows_with_heads_first_are_left_to_the_engine(layout):
    assert layout(swa_pool(), swa_kv_cache_layout="hnd").state == ()


@pytest.mark.parametrize("kinds", [[StateType.SWA, StateType.MAMBA], [StateType.MAMBA], []])
def test_unsupported_state_types_are_left_to_the_engine(kinds, layout):
    """A transfer plan has one state type; state of another type would not be sent."""
    pool = swa_pool()
    _, lengths, items = pool.get_state_buf_infos()
    each = {"state_data_lens": [lengths] * len(kinds), "state_item_lens": [items] * len(kinds)}
    pointers = [pool.get_state_buf_infos()[0]] * len(kinds)
    assert layout(pool, state_types=kinds, state_data_ptrs=pointers, **each).state == ()


def test_aux_slots_are_the_fewest_of_any_buffer(layout):
    lengths = [64 * SLOTS] * ROWS
    lengths[3] *= 2
    assert layout(mha(), aux_data_lens=lengths).aux_slots == SLOTS


def test_unknown_metadata_buffers_are_left_to_the_engine(layout, monkeypatch):
    few = {"aux_item_lens": [64] * HIDDEN_STATES, "aux_data_lens": [64] * HIDDEN_STATES}
    assert layout(mha(), **few).aux == ()
    monkeypatch.setenv(MORE_ROWS, "1")
    assert layout(mha()).aux == ()


# Head slices as whole rows


def test_buffers_are_viewed_where_they_are(described_args):
    pool, windows = mha(), swa_pool()
    args = described_args(pool)
    assert [pages.data_ptr() for pages in args.views.kv] == args.kv_data_ptrs
    assert [pages.nbytes for pages in args.views.kv] == args.kv_data_lens
    args = described_args(windows)
    assert [[pages.data_ptr() for pages in args.views.state]] == args.state_data_ptrs


@pytest.mark.parametrize(
    "backend, whole_rows", [("nixl", True), ("mooncake", True), ("ascend", True), ("mori", False)]
)
def test_only_patched_backends_send_whole_rows(described_args, backend, whole_rows):
    """The others' managers name no chunks, for which decode would wait."""
    args = described_args(mha(), backend=backend)
    assert args.layout.whole_rows == whole_rows


def can_pack(args) -> bool:
    return make_packing_buffers(args, workers=1) is not None


@pytest.fixture
def two_heads(described_args):
    """A function that describes a rank with two of four heads, which it must pack."""
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)

    def described():
        with single_rank_context():
            pool = MHATokenToKVPool(**SIZES, **{**HEADS, "head_num": 2}, layer_num=LAYERS)
        return described_args(pool, scheduler={"model_config": model})

    return described


def test_whole_rows_are_on_by_default(two_heads):
    args = two_heads()
    assert args.layout.whole_rows and can_pack(args)


@pytest.mark.parametrize(
    "variable, value",
    [
        ("SGLANG_PD_PACKED", "0"),
        ("SGLANG_DISAGG_STAGING_BUFFER", "1"),  # the engine's own way goes first
    ],
)
def test_whole_rows_are_off(variable, value, two_heads, monkeypatch):
    monkeypatch.setenv(variable, value)
    args = two_heads()
    assert args.layout is not None and not args.layout.whole_rows
    assert not can_pack(args)


def test_without_memory_to_pack_in_decode_still_interleaves(two_heads, monkeypatch):
    monkeypatch.setenv("SGLANG_PD_PACKING_MIB", "0")
    args = two_heads()
    assert args.layout.whole_rows and not can_pack(args)


@pytest.mark.parametrize(
    "variable, value, expected",
    [
        ("SGLANG_PD_PACKED", "yes", "expected 1 or 0"),
        ("SGLANG_PD_PACKING_MIB", "-1", "expected 0 MiB or more"),
    ],
)
def test_invalid_variable_stops_the_server(variable, value, expected, described_args, monkeypatch):
    """Also that of a rank whose buffers are left to the engine."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"{variable} is '{value}'; {expected}"):
        described_args(mha(), kv_layer_ids=[0, 1, 2])
