"""Tiny draft models for speculative decoding, made from their target models.

A draft model's input is each token together with the target's hidden state of the token before; its
only layer is the target's first.  So it predicts some tokens and not others, and its predictions
depend on its own KV cache, and a little on the hidden states.  The engine gives it the target's
embedding and head.
"""

import json
from pathlib import Path

from pd_harness.cpu_host.models import TinyLlama, TinyMLA, TinyModel, write_atomically

HIDDEN_WEIGHT = 0.02  # weight of a hidden state; an embedding's elements are about 0.25
# A layer's output is about 25 in each element, but the hidden state that a draft model passes to
# its next step must have the target's size, which is 1.
OUTPUT_SCALE = 1 / 25
ROUTED_EXPERTS = 4  # their output is 0; each TP rank must have one


def make_draft(target: TinyModel, folder: Path) -> Path:
    """The folder of a draft model's checkpoint below ``folder``; writes it if it does not exist.

    Raises:
        TypeError: this family has no draft models.
    """
    kinds = {TinyLlama: eagle, TinyMLA: nextn}
    kind = next((kinds[one] for one in kinds if isinstance(target, one)), None)
    if kind is None:
        raise TypeError(f"no draft model for {target.family}")
    source = target.make(folder)

    def write(unfinished: Path) -> None:
        from safetensors.torch import load_file, save_file

        config = json.loads((source / "config.json").read_text())
        more, weights = kind(load_file(source / "model.safetensors"), config)
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps({**config, **more}))

    return write_atomically(folder / f"{target.name}-{kind.__name__}", write)


def eagle(weights: dict, config: dict) -> tuple[dict, dict]:
    """Changes to the target's config, and the weights, for an EAGLE draft of the Llama family.

    An EAGLE draft has no norm after its layer, and none before it, where the target's norm divides
    an embedding by its size; here the weights do.
    """
    start = "model.layers.0."
    layer = {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}
    del layer["input_layernorm.weight"]
    size = OUTPUT_SCALE * _rms(weights["model.embed_tokens.weight"])
    for name in ("q_proj", "k_proj", "v_proj"):
        layer[f"self_attn.{name}.weight"] /= size
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layer[f"{name}.weight"] *= OUTPUT_SCALE
    both = OUTPUT_SCALE * _fusion_weights(1, config)
    return (
        {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1},
        {
            **{f"layers.0.{name}": weight for name, weight in layer.items()},
            "fc.weight": both,
            "fc.bias": both.new_zeros(len(both)),
        },
    )


def nextn(weights: dict, config: dict) -> tuple[dict, dict]:
    """Changes to the config, and the weights, for DeepSeek-V3's next-token layer.

    The engine expects experts as its MLP: the shared expert is the target's MLP.
    """
    start, end = "model.layers.0.", f"model.layers.{config['num_hidden_layers']}."
    layer = {
        name.replace(start, end).replace(".mlp.", ".mlp.shared_experts."): weight
        for name, weight in weights.items()
        if name.startswith(start)
    }
    ones = weights["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        layer[f"{end}{name}.weight"] = ones.clone()
    size = _rms(weights["model.embed_tokens.weight"])
    layer[f"{end}eh_proj.weight"] = _fusion_weights(size, config)
    layer[f"{end}mlp.gate.weight"] = ones.new_zeros(ROUTED_EXPERTS, len(ones))
    for name in ("gate_proj", "up_proj", "down_proj"):
        silent = weights[f"{start}mlp.{name}.weight"] * 0
        for expert in range(ROUTED_EXPERTS):
            layer[f"{end}mlp.experts.{expert}.{name}.weight"] = silent.clone()
    experts = {
        "n_routed_experts": ROUTED_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": config["intermediate_size"],
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
    architecture = {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    return {**architecture, **experts}, layer


def _rms(weight):
    """Root mean square of all elements, a scalar tensor."""
    return weight.pow(2).mean().sqrt()


def _fusion_weights(token, config: dict):
    """Weights [width, 2 * width] that add an embedding, times ``token``, and a hidden state."""
    import torch

    one = torch.eye(config["hidden_size"])
    return torch.cat([token * one, HIDDEN_WEIGHT * one], dim=1)
