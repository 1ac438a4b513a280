"""Tiny models: made once, whole, the same every time."""

import json
import threading

import pytest

from sglang_pd.cpu_host.models import VOCABULARY, TinyModel, byte_tokenizer

transformers = pytest.importorskip("transformers", reason="needs the packages of .pd-env/base")

SMALL = TinyModel(layers=1, heads=2, kv_heads=1, head_dim=16, hidden=32)


def test_same_parameters_same_weights(tmp_path):
    first = SMALL.make(tmp_path / "a")
    second = SMALL.make(tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_config_is_what_was_asked_for(tmp_path):
    config = json.loads((SMALL.make(tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_key_value_heads"] == 1
    assert config["head_dim"] == 16
    assert config["dtype"] == "float32"


def test_made_at_once_by_two(tmp_path):
    threads = [threading.Thread(target=SMALL.make, args=(tmp_path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.name for entry in tmp_path.iterdir()] == [SMALL.name]
    assert (tmp_path / SMALL.name / "tokenizer.json").is_file()


def test_each_token_reads_as_a_text_of_its_own():
    tokenizer = byte_tokenizer()
    assert len({tokenizer.decode([token]) for token in range(VOCABULARY)}) == VOCABULARY
    assert len(tokenizer("wörld")["input_ids"]) == len("wörld".encode())
