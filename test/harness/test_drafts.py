"""Tiny draft models are made once from their target, as checkpoints that the engine accepts."""

import json

import pytest

from pd_harness.cpu_host.drafts import make_draft
from pd_harness.cpu_host.models import TinyGQA, TinyLlama, TinyMLA

pytest.importorskip("transformers", reason="needs the packages of .pd-env/base")

SIZES = {"layers": 3, "heads": 2, "hidden": 32, "head_dim": 16}
LLAMA = TinyLlama(kv_heads=1, **SIZES)
MLA = TinyMLA(latent=16, rope=8, **SIZES)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("target", [LLAMA, MLA], ids=["eagle", "nextn"])
def test_draft_is_made_once_beside_its_target(target, tmp_path):
    first = make_draft(target, tmp_path)
    assert (tmp_path / target.name / "model.safetensors").is_file()
    time = (first / "model.safetensors").stat().st_mtime_ns
    assert make_draft(target, tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == time


def test_eagle_draft_has_one_layer_and_reads_hidden_states(tmp_path):
    folder = make_draft(LLAMA, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["num_hidden_layers"] == 1
    found = weights(folder)
    assert found["fc.weight"].shape == (32, 64)
    assert found["fc.weight"][:, 32:].any(dim=1).all()
    assert not any(name.startswith("layers.1.") for name in found)
    assert "layers.0.input_layernorm.weight" not in found


def test_nextn_draft_is_the_layer_after_the_last(tmp_path):
    folder = make_draft(MLA, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1
    found, target = weights(folder), weights(tmp_path / MLA.name)
    assert all(name.startswith("model.layers.3.") for name in found)
    shared = found["model.layers.3.mlp.shared_experts.up_proj.weight"]
    assert shared.equal(target["model.layers.0.mlp.up_proj.weight"])
    assert not found["model.layers.3.mlp.experts.0.down_proj.weight"].any()


def test_later_layers_have_smaller_weights(tmp_path):
    loud, quiet = (
        weights(TinyLlama(kv_heads=1, later_weight=later_weight, **SIZES).make(tmp_path))
        for later_weight in (1, 0.5)
    )
    name = "model.layers.{}.mlp.down_proj.weight"
    assert quiet[name.format(0)].equal(loud[name.format(0)])
    assert quiet[name.format(2)].equal(0.5 * loud[name.format(2)])


def test_model_family_without_draft_is_refused(tmp_path):
    with pytest.raises(TypeError, match="no draft model for qwen3"):
        make_draft(TinyGQA(**SIZES), tmp_path)
