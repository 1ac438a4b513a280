"""Tiny models are made once, completely, and with the same weights every time."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest

from pd_harness.cpu_host.models import (
    VOCABULARY,
    TinyGQA,
    TinyLlama,
    TinyMLA,
    byte_tokenizer,
    load_checkpoint,
)

pytest.importorskip("transformers", reason="needs the packages of .pd-env/base")

SMALL = TinyGQA(layers=1, heads=2, kv_heads=1, head_dim=16, hidden=32)
SMALL_MLA = TinyMLA(layers=1, heads=2, latent=16, rope=8, head_dim=16, hidden=32)


def test_equal_parameters_make_equal_weights(tmp_path):
    first = SMALL.make(tmp_path / "a")
    second = SMALL.make(tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_gqa_config_matches_parameters(tmp_path):
    config = json.loads((SMALL.make(tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_key_value_heads"] == 1
    assert config["head_dim"] == 16
    assert config["dtype"] == "float32"


def test_mla_config_has_fields_read_by_engine(tmp_path):
    config = json.loads((SMALL_MLA.make(tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"]) == (16, 8)
    assert config["q_lora_rank"] is None
    rope = config["rope_parameters"] if "rope_parameters" in config else config["rope_scaling"]
    assert rope["rope_type"] == "yarn"
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 1
    assert config["moe_layer_freq"] == 1


def logprobs_after(network, tokens, wrong: tuple[int, str] | None = None):
    """Returns the logprobs of all candidates for the token after ``tokens``.

    ``wrong`` is a layer, and "keys" or "values", in which a page of 16 tokens is zero.
    """
    import torch

    with torch.no_grad():
        cache = network(tokens[:, :-1], use_cache=True).past_key_values
        if wrong:
            getattr(cache.layers[wrong[0]], wrong[1])[:, :, 32:48] = 0
        logits = network(tokens[:, -1:], past_key_values=cache).logits
    return logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize(
    "model",
    [TinyGQA(), TinyMLA(layers=7), TinyLlama(later_weight=0.1), TinyMLA(later_weight=0.1)],
    ids=["gqa", "mla", "drafted_llama", "drafted_mla"],
)
def test_answers_depend_on_the_whole_kv_cache(model, tmp_path):
    """One wrong page in one layer changes a single token's logprobs."""
    import torch

    network = load_checkpoint(model.make(tmp_path))
    tokens = torch.randint(256, (1, 100), generator=torch.Generator().manual_seed(0))
    right = logprobs_after(network, tokens)
    for wrong in product(range(model.layers), ("keys", "values")):
        apart = (logprobs_after(network, tokens, wrong) - right).abs().max()
        assert apart > 0.01, f"{wrong}: logprobs differ by {apart:.4f} only"


def test_concurrent_make_leaves_one_model(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(SMALL.make, [tmp_path] * 2))
    assert [entry.name for entry in tmp_path.iterdir()] == [SMALL.name]
    assert (tmp_path / SMALL.name / "tokenizer.json").is_file()


def test_each_token_decodes_to_distinct_text():
    tokenizer = byte_tokenizer()
    assert len({tokenizer.decode([token]) for token in range(VOCABULARY)}) == VOCABULARY
    assert len(tokenizer("wörld")["input_ids"]) == len("wörld".encode())
