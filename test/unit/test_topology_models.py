"""What a model stores per token, by its configuration, and how a server splits it."""

import json
from types import SimpleNamespace

import pytest
from hf_configs import ALL_CONFIGS, DEEPSEEK_V3, DEEPSEEK_V32, FALCON_H1, GPT_OSS, QWEN3

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.hybrids import RECURRENT
from sglang_pd.plan.model import KVHeads, Model, config_to_model, read_model
from sglang_pd.plan.pair import BACKENDS, make_pair
from sglang_pd.plan.sizes import PARTITION_VARIABLE, ServerSizes, parse_sizes


def model_of(config: dict) -> Model:
    return config_to_model(config, "", "0.5.23")


def bytes_per_token(config: dict, backend="nixl") -> int:
    alone = ServerSizes()
    pair = make_pair(model_of(config), alone, alone, backend, "0.5.23", False)
    rank = pair.layout("prefill", 0, 0)
    return sum(buffer.page_bytes for buffer in (*rank.kv, *rank.state)) // rank.page_size


def test_bytes_per_token():
    assert bytes_per_token(QWEN3) == 64 * 2 * 8 * 128 * 2
    assert bytes_per_token(DEEPSEEK_V3) == 61 * (512 + 64) * 2
    assert bytes_per_token(DEEPSEEK_V32) == 61 * ((512 + 64) * 2 + 128 + 4)
    assert bytes_per_token(DEEPSEEK_V32, "ascend") == 61 * (512 + 64 + 128) * 2
    assert bytes_per_token(GPT_OSS) == 36 * 2 * 8 * 64 * 2
    assert bytes_per_token(ALL_CONFIGS["gemma3"]) == 12 * 2 * 4 * 256 * 2  # windows keep all tokens
    assert bytes_per_token(ALL_CONFIGS["mimo"]) == (2 * 4 + 4 * 8) * (192 + 128) * 2


def test_kv_heads_from_config_variants():
    said = {**ALL_CONFIGS["llama"], "num_key_value_heads": None}
    for changed, total in (
        ({}, 32),
        ({"multi_query": True}, 1),
        ({"num_attention_groups": 2}, 2),
        ({"num_kv_heads": 4, "multi_query": True, "new_decoder_architecture": True}, 4),
    ):
        assert model_of({**said, **changed}).kv_heads == total


def test_recurrent_state_bytes_of_a_rank():
    """Falcon-H1's single group of B and C is on both ranks."""
    state = model_of(FALCON_H1).recurrent
    assert state.slot(1) == ((24 * 64 + 2 * 128) * 3 * 2, 24 * 64 * 128 * 4)
    assert state.slot(2) == ((12 * 64 + 2 * 128) * 3 * 2, 12 * 64 * 128 * 4)


def kinds(name: str) -> str:
    initials = {frozenset(): "-", frozenset({"full", RECURRENT}): "B"}
    found = model_of(ALL_CONFIGS[name]).kinds
    return "".join(initials.get(kind) or next(iter(kind))[0].upper() for kind in found)


def test_layer_kinds_from_config():
    assert kinds("mimo") == "FWWWWF"
    assert kinds("gpt_oss") == "WF" * 18
    assert kinds("gemma3") == "F" * 12
    assert kinds("qwen3_next") == "RRRF" * 12
    assert kinds("falcon_h1") == "BBBB"
    assert kinds("nemotron_h") == "R-RF-R"


@pytest.mark.parametrize("name", ALL_CONFIGS)
def test_planned_layouts_match_described_pools(name):
    """The planner names and orders buffers like `describe_pools` does for the engine's pools."""
    model = model_of(ALL_CONFIGS[name])
    for backend in BACKENDS:
        sizes = ServerSizes(tp=2, draft=0 if model.recurrent else 1)
        pair = make_pair(model, sizes, sizes, backend, "0.5.23", False)
        rank = pair.layout("prefill", 1, 0)
        pools = (pool(pair), attention_pool(pair, range(1)) if sizes.draft else None)
        for state, held in ((False, rank.kv), (True, rank.state)):
            lengths, total = [buffer.page_bytes for buffer in held], model.kv_heads
            described = kv_layout.describe_pools(
                *pools, lengths, lengths, state, (1, 2), total, total
            )
            assert [one.key for one in described] == [one.key for one in held]
            if not model.window_heads:  # a pool of windows does not state its total of heads
                assert [one.heads for one in described] == [one.heads for one in held]


def pool(pair) -> SimpleNamespace:
    """Returns a pool with the attributes by which `kv_layout.pools` distinguishes pools."""
    model = pair.model
    full, whole = model.layers_of_kind("full"), range(model.layers)
    if model.window_heads:
        windows = set(model.layers_of_kind("window"))
        mapping = {n: (n, n in windows) for n in sorted(whole, key=lambda n: n in windows)}
        inner = SimpleNamespace(head_num=model.window_heads.total // 2)
        return SimpleNamespace(
            full_kv_pool=attention_pool(pair, full), swa_kv_pool=inner, layers_mapping=mapping
        )
    if model.recurrent:
        layers = model.layers_of_kind(RECURRENT) * 2
        state = SimpleNamespace(num_mamba_layers=0, get_state_layer_ids=lambda: layers)
        return SimpleNamespace(
            full_kv_pool=attention_pool(pair, full),
            full_attention_layer_id_mapping=full,
            mamba_pool=state,
        )
    return attention_pool(pair, whole)


def attention_pool(pair, layers) -> SimpleNamespace:
    held, stage = pair.model.attention, {"start_layer": layers[0], "layer_num": len(layers)}
    if isinstance(held, KVHeads):
        return SimpleNamespace(head_num=held.total // 2, **stage)
    stage["kv_lora_rank"] = held.latent
    if pair.backend == "ascend":
        return SimpleNamespace(index_k_buffer=object() if held.index else None, **stage)
    index = {"index_k_with_scale_buffer": object()} if held.index else {}
    return SimpleNamespace(kv_buffer=object(), **index, **stage)


@pytest.mark.parametrize(
    "layers, pp, starts",
    [(61, 2, [0, 30, 61]), (94, 4, [0, 23, 46, 70, 94]), (7, 3, [0, 2, 4, 7]), (4, 4, range(5))],
)
def test_stages_split_layers_like_the_engine(layers, pp, starts):
    assert ServerSizes(pp=pp).stages(layers) == [range(a, b) for a, b in zip(starts, starts[1:])]


def test_explicit_stage_sizes_are_used(monkeypatch):
    assert parse_sizes("pp=2,layers=5+2").stages(7) == [range(5), range(5, 7)]
    monkeypatch.setenv(PARTITION_VARIABLE, "1,6")
    assert parse_sizes("pp=2").stages(7) == [range(1), range(1, 7)]
    assert parse_sizes("tp=2").stages(7) == [range(7)]
    with pytest.raises(ValueError, match="8 layers cannot be split into 2 stages of 1[+]6"):
        parse_sizes("pp=2").stages(8)


@pytest.mark.parametrize(
    "text, says",
    [
        ("tp=four", "'four' is not a number"),
        ("ep=4", "'ep=4' is not a size; sizes are tp, pp"),
        ("tp=3,dp=2", "3 TP ranks cannot form 2 groups"),
        ("tp=0", "1 or more"),
    ],
)
def test_invalid_sizes_are_refused(text, says):
    with pytest.raises(ValueError, match=says):
        parse_sizes(text)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"linear_attn_config": {}, "compress_ratios": [4]}, "compressed attention"),
        ({"layer_types": ["conv"] * 32}, "'conv'"),
        ({"layer_types": ["full_attention"]}, "1 layer kinds for 32 layers"),
        ({"torch_dtype": "int3"}, "int3"),
        ({"num_hidden_layers": None}, "invalid entry"),
    ],
)
def test_unsupported_models_are_refused(tmp_path, changed, says):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**ALL_CONFIGS["llama"], **changed}))
    with pytest.raises(Refusal) as caught:
        read_model(tmp_path, "0.5.23")
    assert caught.value.code is ExitCode.NO_MODEL and says in str(caught.value)


def test_missing_or_empty_config_is_refused(tmp_path):
    for text in ("", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(Refusal, match="config.json"):
            read_model(tmp_path, "0.5.23")
    with pytest.raises(Refusal, match="pass a config.json"):
        read_model(tmp_path / "nothing", "0.5.23")
