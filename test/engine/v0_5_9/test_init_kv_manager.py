"""The `KVArgs` that both queues' `_init_kv_manager` makes from the engine's pools."""

from types import SimpleNamespace

import engine_calls
import pytest
import torch
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.disaggregation.base import KVArgs
from sglang.srt.disaggregation.utils import KVClassType, MetadataBuffers
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, NSATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

pytestmark = pytest.mark.engine

QUEUES = {"prefill": prefill.PrefillBootstrapQueue, "decode": decode.DecodePreallocQueue}
LAYERS = 7  # of the whole model; a pool holds two of them


@pytest.fixture(params=QUEUES)
def init_kv_args(request, monkeypatch):
    """A function from pools to the `KVArgs` of the manager."""
    module = {"prefill": prefill, "decode": decode}[request.param]
    classes = {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: lambda kv_args, *rest: SimpleNamespace(kv_args=kv_args),
    }
    for where in (module, utils):
        monkeypatch.setattr(where, "get_kv_class", lambda backend, kind: classes[kind])
    single = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(parallel_state, "_ATTN_TP", single, raising=False)
    monkeypatch.setattr(dp_attention, "_ATTN_DP_RANK", 0)
    monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", 1)

    def kv_args(target, draft=None, computed=LAYERS) -> KVArgs:
        model = SimpleNamespace(
            num_hidden_layers=LAYERS,
            get_total_num_kv_heads=lambda: 2,
            get_swa_num_kv_heads=lambda ranks: 2,
        )
        queue = object.__new__(QUEUES[request.param])
        queue.__dict__.update(
            token_to_kv_pool=target,
            draft_token_to_kv_pool=draft,
            is_mla_backend=isinstance(target, MLATokenToKVPool),
            metadata_buffers=MetadataBuffers(4, 16, torch.float32),
            transfer_backend=None,
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            prefill_pp_size=1,
            decode_tp_size=1,
            decode_dp_size=1,
            gpu_id=0,
            scheduler=SimpleNamespace(
                dp_rank=None,
                gpu_id=0,
                model_config=model,
                draft_worker=SimpleNamespace(model_config=model),
                tp_worker=SimpleNamespace(
                    model_runner=SimpleNamespace(start_layer=0, end_layer=computed)
                ),
                spec_algorithm=SpeculativeAlgorithm.NONE,
                server_args=SimpleNamespace(disaggregation_ib_device=None, pp_size=1),
            ),
        )
        return queue._init_kv_manager().kv_args

    return kv_args


def mla_pool(kind=MLATokenToKVPool, layers=1, **more):
    return kind(
        size=128,
        page_size=64,
        dtype=torch.float32,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        **more,
    )


def nsa_pool(layers, start_layer=0):
    place = {"start_layer": start_layer, "end_layer": start_layer + layers - 1}
    return mla_pool(NSATokenToKVPool, layers, index_head_dim=128, kv_cache_dim=20, **place)


def buffer_keys(buffers):
    return [(b.component, b.draft, b.layer) for b in buffers]


@pytest.mark.parametrize("index_keys, groups", [(False, 2), (True, 3)])
def test_npu_mla_is_described(init_kv_args, index_keys, groups):
    """Index keys are registered once, as KV's third group; without an indexer there are two."""
    args = init_kv_args(engine_calls.mla_pool(index_keys, 16, start_layer=3))
    assert (args.kv_buf_groups, args.total_kv_layers) == (groups, LAYERS)
    assert (args.state_type, args.state_data_ptrs) == ("none", [])
    assert len(set(args.kv_data_ptrs)) == len(args.kv_data_ptrs) == 2 * groups
    names = ["k", "v", "index_k"][:groups]
    assert buffer_keys(args.layout.kv) == [(c, False, n) for c in names for n in (3, 4)]


def test_npu_mla_groups_do_not_depend_on_the_draft(init_kv_args):
    """Counted with the draft's pointers, a short stage would seem to have more groups."""
    args = init_kv_args(
        engine_calls.mla_pool(False, 16, layers=1), engine_calls.mla_pool(False, 16, layers=1)
    )
    assert args.kv_buf_groups == 2
    assert buffer_keys(args.layout.kv) == [(c, d, 0) for d in (False, True) for c in ("k", "v")]


def test_npu_mha_is_described(init_kv_args):
    args = init_kv_args(engine_calls.mha_pool(fia=True, page_size=16, start_layer=3))
    assert args.layout.total_layers == LAYERS
    assert buffer_keys(args.layout.kv) == [(c, False, n) for c in ("k", "v") for n in (3, 4)]
    assert {b.page_bytes for b in args.layout.kv} == {
        16 * engine_calls.HEADS * engine_calls.WIDTH * 4
    }


def test_nsa_state_has_target_then_draft(init_kv_args):
    """PR #23539: the draft's index keys after the target's."""
    target, draft = nsa_pool(2, start_layer=3), nsa_pool(1)
    args = init_kv_args(target, draft)
    assert args.state_type == "nsa"
    buffers = [*target.index_k_with_scale_buffer, *draft.index_k_with_scale_buffer]
    assert args.state_data_ptrs == [buffer.data_ptr() for buffer in buffers]
    expected = [("index_k", False, 3), ("index_k", False, 4), ("index_k", True, 0)]
    assert buffer_keys(args.layout.state) == expected


def test_swa_pool_marks_the_next_stages_layer_as_unused(init_kv_args):
    """The engine's pool of layers 0 to 2 has layer 3, too, which this stage never computes."""
    pool = SWAKVPool(
        size=32,
        size_swa=32,
        page_size=16,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        enable_kvcache_transpose=False,
        device="cpu",
    )
    layout = init_kv_args(pool, computed=3).layout
    assert buffer_keys(layout.kv) == [(c, False, n) for c in ("k", "v") for n in (1, 3)]
    assert buffer_keys(layout.state) == [(c, False, n) for c in ("swa_k", "swa_v") for n in (0, 2)]
    assert layout.whole_rows
    assert {b.layer for b in (*layout.kv, *layout.state) if b.unused} == {3}
    assert {b.pages for b in (*layout.kv, *layout.state)} == {3}  # page 0 is padding


def test_draft_without_separate_state(init_kv_args):
    args = init_kv_args(nsa_pool(2), mla_pool())
    assert buffer_keys(args.layout.state) == [("index_k", False, 0), ("index_k", False, 1)]


class UnknownPool(MLATokenToKVPool):
    """A pool unknown to the patch set, with two buffers more than an MLA pool."""

    def get_contiguous_buf_infos(self):
        ptrs, lens, items = super().get_contiguous_buf_infos()
        return [*ptrs, 1 << 40, 2 << 40], [*lens, 640, 320], [*items, 64, 32]


def test_unknown_pool_is_sent_as_opaque_buffers(init_kv_args, caplog):
    args = init_kv_args(mla_pool(UnknownPool, 2))
    layout = args.layout
    assert args.views is None and not layout.whole_rows
    assert buffer_keys(layout.kv) == [("opaque", False, n) for n in range(4)]
    assert [buffer.page_bytes for buffer in layout.kv[2:]] == [64, 32]
    assert [buffer.pages for buffer in layout.kv[2:]] == [10, 10]
    assert "Unsupported KV layout of UnknownPool, " in caplog.text


def test_uninspectable_pool_is_sent_as_opaque_buffers(init_kv_args, caplog):
    pool = mla_pool(UnknownPool, 2)
    pool.start_layer = None
    assert len(init_kv_args(pool).layout.kv) == 4
    assert "TypeError" in caplog.text


@pytest.mark.parametrize(
    "variable, value, whole_rows",
    [
        ("SGLANG_PD_PACKED", "", True),
        ("SGLANG_PD_PACKED", "1", True),
        ("SGLANG_PD_PACKED", "0", False),
        ("SGLANG_USE_FIA_NZ", "1", False),  # a token's bytes do not lie together
    ],
)
def test_heads_are_sent_as_whole_rows(init_kv_args, monkeypatch, variable, value, whole_rows):
    monkeypatch.setenv(variable, value)
    args = init_kv_args(engine_calls.mha_pool(fia=True, page_size=16))
    assert args.layout.whole_rows == whole_rows == (args.views is not None)
    if whole_rows:
        assert [pages.data_ptr() for pages in args.views.kv] == args.kv_data_ptrs
        assert [pages.numel() for pages in args.views.kv] == args.kv_data_lens


def test_latents_are_not_sent_as_rows_of_heads(init_kv_args):
    target = nsa_pool(2)
    args = init_kv_args(target, mla_pool())
    assert not args.layout.whole_rows and args.views is None


@pytest.mark.parametrize(
    "variable",
    [
        "SGLANG_PD_SILENT_SECONDS",
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
        "SGLANG_PD_PACKED",
    ],
)
def test_wrong_variable_stops_the_server(init_kv_args, variable, monkeypatch):
    """Threads read it later, whose failure would go unnoticed."""
    monkeypatch.setenv(variable, "soon")
    with pytest.raises(ValueError, match=f"{variable} is 'soon'"):
        init_kv_args(mla_pool())
