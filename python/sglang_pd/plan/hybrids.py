"""Which layers of a model have full attention, a sliding window, or recurrent state.

A layer counts as such only if the engine has a separate pool for it: with Gemma 3, for example,
the engine keeps all tokens of layers with windows, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_pd.errors import ExitCode, Refusal

FULL, WINDOW, RECURRENT = "full", "window", "recurrent"
# Kinds by the configurations' names; None for layers that keep nothing.
LAYER_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "*": FULL,
    "sliding_attention": WINDOW,
    "chunked_attention": WINDOW,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "M": RECURRENT,
    "mlp": None,
    "moe": None,
    "-": None,
    "E": None,
}
# Models for whose windows the engine has a pool, and the first release with that pool.
WINDOW_POOLS = {
    "GptOssForCausalLM": "0.5.9",
    "Llama4ForConditionalGeneration": "0.5.9",
    "MiMoV2FlashForCausalLM": "0.5.9",
    "Step3p5ForCausalLM": "0.5.9",
    "GraniteSWAForCausalLM": "0.5.23",
    "GraniteMoeSWAForCausalLM": "0.5.23",
    "LagunaForCausalLM": "0.5.18",
    "MellumForCausalLM": "0.5.18",
}
# Models with both attention and recurrent state in each layer.
PARALLEL_HYBRIDS = ("FalconH1ForCausalLM",)
# Configuration keys of models whose pools are not supported here, and what the keys mean.
UNSUPPORTED_KEYS = {
    "compress_ratios": "compressed attention",
    "linear_attn_config": "linear attention with a window for each convolution",
    "conv_L_cache": "short convolutions",
    "attn_type_list": "lightning attention",
    "layer_group_size": "lightning attention",
    "attn_layer_period": "Mamba 1",
    "global_head_dim": "KV heads of two widths",
    "mtp_local_layer_ids": "drafts with windows",
}


@dataclass(frozen=True)
class RecurrentState:
    """State of one layer and request: the window of its convolutions, and the state proper.

    The state proper has the shape (heads, width, state).
    """

    channels: int  # of x; with those of B and C they form the window's channels
    groups: int  # each with `state` channels in B and in C
    heads: int
    width: int
    state: int
    window: int  # in tokens
    itemsize: int  # bytes per element of the state proper; an element of the window has 2
    has_named_channels: bool  # whether the engine knows x from B and C, as for linear attention

    def slot(self, tp: int) -> tuple[int, int]:
        """Returns a rank's bytes of the window and of the state proper.

        If the groups cannot be divided among the ranks, each rank has one group.
        """
        groups = self.groups if self.groups % tp == 0 else tp
        window = (self.channels + 2 * groups * self.state) // tp * self.window * 2
        return window, self.heads // tp * self.width * self.state * self.itemsize


def layer_kinds(config: Mapping[str, Any], architecture: str, layers: int) -> list[set[str]]:
    """Returns what each layer keeps: FULL, WINDOW, RECURRENT, FULL and RECURRENT, or nothing.

    Raises Refusal NO_MODEL for a model or a kind of layer that is not supported here.
    """
    for name, what in UNSUPPORTED_KEYS.items():
        if config.get(name):
            raise unsupported_model(f"{what} ({name})")
    if architecture in PARALLEL_HYBRIDS:
        return [{FULL, RECURRENT}] * layers
    named = _layer_names(config, architecture, layers)
    if len(named) < layers:
        raise unsupported_model(f"{len(named)} layer kinds for {layers} layers")
    kinds = []
    for name in named[:layers]:
        if name not in LAYER_KINDS:
            raise unsupported_model(f"layers of kind {name!r}")
        kinds.append({LAYER_KINDS[name]} - {None})
    return kinds


def _layer_names(config: Mapping[str, Any], architecture: str, layers: int) -> list[str]:
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.get(key):
            return list(config[key])
    if pattern := config.get("hybrid_layer_pattern"):
        return ["sliding_attention" if one else "full_attention" for one in pattern]
    rest, every = "full_attention", 1
    if architecture.startswith("Llama4"):
        rest, every = "sliding_attention", 4
    elif config.get("linear_num_value_heads"):
        rest, every = "linear_attention", config.get("full_attention_interval", 4)
    return [rest if (layer + 1) % every else "full_attention" for layer in range(layers)]


def recurrent_state(config: Mapping[str, Any]) -> RecurrentState:
    """Returns the state of a model's recurrent layers, of linear attention or of Mamba 2.

    Raises Refusal NO_MODEL if the configuration lacks a size.
    """
    itemsize = {"bfloat16": 2, "float16": 2}.get(config.get("mamba_ssm_dtype"), 4)

    def required_int(*names: str) -> int:
        for name in names:
            if config.get(name) is not None:
                return int(config[name])
        raise unsupported_model(f"recurrent layers without {' or '.join(names)}")

    if config.get("linear_num_value_heads"):
        heads, width = required_int("linear_num_value_heads"), required_int("linear_value_head_dim")
        groups, state = required_int("linear_num_key_heads"), required_int("linear_key_head_dim")
        window = required_int("linear_conv_kernel_dim") - 1
        return RecurrentState(heads * width, groups, heads, width, state, window, itemsize, True)
    heads = required_int("mamba_n_heads", "mamba_num_heads")
    width = required_int("mamba_d_head", "mamba_head_dim")
    groups, state = (
        required_int("mamba_n_groups", "n_groups"),
        required_int("mamba_d_state", "ssm_state_size"),
    )
    window = required_int("mamba_d_conv", "conv_kernel") - 1
    return RecurrentState(heads * width, groups, heads, width, state, window, itemsize, False)


def unsupported_model(what: str) -> Refusal:
    """Returns the refusal of a model because of a feature, `what`."""
    return Refusal(
        ExitCode.NO_MODEL,
        f"plan does not support models with {what}; use sglang-pd verify on running servers",
    )
