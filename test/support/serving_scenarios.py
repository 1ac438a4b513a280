"""What the serving tests run: topologies, tiny models, and what the stock engine makes of them."""

import dataclasses
import random
from pathlib import Path

from pd_harness.cluster import OF_RELEASE, Topology
from pd_harness.cpu_host.models import TinyGQA, TinyMLA, TinyModel
from pd_harness.device import device


class Mild:
    """Weights for half precision: of a range where it seldom decides on another token.

    With them a float16 logprob is within 0.011 of float32's (with the usual ones within 3.9, and
    a quarter of the tokens differ); KV of swapped layers or heads still moves one by 0.4 or more.
    """

    @property
    def name(self) -> str:
        return f"{super().name}-mild"

    def network(self, **common):
        return super().network(**{**common, "initializer_range": 0.08})


@dataclasses.dataclass(frozen=True)
class MildGQA(Mild, TinyGQA):
    """GQA for an NPU."""


@dataclasses.dataclass(frozen=True)
class MildMLA(Mild, TinyMLA):
    """MLA for an NPU, whose attention wants the widths of DeepSeek's models."""

    latent: int = 512
    rope: int = 64
    head_dim: int = 128


GQA, MLA = (MildGQA, MildMLA) if device() == "npu" else (TinyGQA, TinyMLA)
FOUR_HEADS = GQA(layers=4, kv_heads=4)
TWO_HEADS = GQA(layers=4, kv_heads=2)
FIVE_LAYERS = GQA(layers=5, kv_heads=4)
SEVEN_LAYERS = GQA(layers=7, kv_heads=4)
SEVEN_LAYERS_MLA = MLA(layers=7)

NEW_TOKENS = 12
# From one token to many pages; the last is prefilled, and sent, in three chunks.
PROMPT_LENGTHS = (1, 7, 16, 33, 150, 600)
# So long answers that all prompts are decoded at once, and a pool that takes the prompts, in 54
# pages of 16 tokens, and one answer in 4 more, so that a request alone among prompts that wait
# comes to its end; but not all answers, in 78.
LONG = 64
FULL = 59 * 16


def prompts() -> list[list[int]]:
    """Token ids that share no prefix, the same in every run."""
    source = random.Random(0)
    return [[source.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]


def model_folder(model: TinyModel) -> Path:
    """The model's checkpoint, made on first use."""
    return model.make(OF_RELEASE / "models")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """``stock`` is what the stock engine does: "right", "wrong", "hang" or "http 500"."""

    name: str
    topology: Topology
    model: TinyModel
    stock: str
    always: tuple[str, ...] = ()  # the tests that it is in without --nightly
    new_tokens: int = NEW_TOKENS


def nixl(name: str, model: TinyModel, stock: str, always=(), **sizes) -> Scenario:
    return Scenario(f"nixl-{name}", Topology("nixl", **sizes), model, stock, always)


def mooncake(name: str, model: TinyModel, stock: str, always=(), **sizes) -> Scenario:
    return Scenario(f"mooncake-{name}", Topology("mooncake", **sizes), model, stock, always)


def ascend(name: str, model: TinyModel, stock: str, always=(), **sizes) -> Scenario:
    return Scenario(
        f"ascend-{name}", Topology("ascend", page_size=16, **sizes), model, stock, always
    )


def full_pool(name: str, model: TinyModel, stock: str, always=(), **sizes) -> Scenario:
    fleet = ascend(f"{name}_full_pool", model, stock, always, decode_tokens=FULL, **sizes)
    return dataclasses.replace(fleet, new_tokens=LONG)


# DP attention: TP ranks in two groups, each with requests of its own.
DP_2 = {"prefill_tp": 2, "prefill_dp": 2}
TO_DP_2 = {"decode_tp": 2, "decode_dp": 2}

# What every run leaves out of "patched" is in test_shared_fleet.py, or differs in one thing alone.
SCENARIOS = [
    nixl("tp2_to_1", FOUR_HEADS, "hang", ("stock",), prefill_tp=2, page_size=16),
    nixl("tp4_to_1_replicated", TWO_HEADS, "hang", ("patched",), prefill_tp=4),
    nixl("tp1_to_4_replicated", TWO_HEADS, "http 500", decode_tp=4),
    nixl("tp2_to_4_replicated", TWO_HEADS, "http 500", prefill_tp=2, decode_tp=4, page_size=16),
    nixl("pp2_tp2_to_1", SEVEN_LAYERS, "hang", prefill_tp=2, prefill_pp=2),
    nixl("pp2_odd_layers", SEVEN_LAYERS, "wrong", ("stock",), prefill_pp=2),
    nixl("tp1_to_1", FOUR_HEADS, "right", page_size=16),
    nixl("tp2_to_2", FOUR_HEADS, "right", prefill_tp=2, decode_tp=2),
    nixl("tp1_to_2", FOUR_HEADS, "right", ("mixed",), decode_tp=2, page_size=128),
    nixl("pp2_even_layers", FOUR_HEADS, "right", prefill_pp=2, page_size=16),
    # Clients ask for logprobs, of which decode's last stage has none at first.
    nixl("dp2_to_dp2", FIVE_LAYERS, "right", **DP_2, **TO_DP_2),
    nixl("tp4_dp2_to_1", FIVE_LAYERS, "hang", prefill_tp=4, prefill_dp=2),
    nixl("pp2_to_dp2", FIVE_LAYERS, "wrong", prefill_pp=2, **TO_DP_2),
    nixl("pp2_to_pp2", FIVE_LAYERS, "http 502", ("stock", "patched"), prefill_pp=2, decode_pp=2),
    mooncake("tp1_to_1", FOUR_HEADS, "right", page_size=16),
    mooncake("tp2_to_1", FOUR_HEADS, "right", prefill_tp=2),
    mooncake("tp1_to_2", FOUR_HEADS, "right", decode_tp=2, page_size=16),
    mooncake("tp4_to_1_replicated", TWO_HEADS, "wrong", prefill_tp=4),
    mooncake("tp1_to_4_replicated", TWO_HEADS, "hang", decode_tp=4),
    mooncake("tp2_to_4_replicated", TWO_HEADS, "hang", prefill_tp=2, decode_tp=4),
    mooncake("pp2_tp2_to_1", SEVEN_LAYERS, "wrong", prefill_tp=2, prefill_pp=2),
    mooncake("pp2_odd_layers", SEVEN_LAYERS, "wrong", ("stock", "patched"), prefill_pp=2),
    mooncake("pp2_even_layers", FOUR_HEADS, "right", prefill_pp=2, page_size=16),
    ascend("mla_pp1", SEVEN_LAYERS_MLA, "right"),
    ascend("mla_pp2", SEVEN_LAYERS_MLA, "wrong", ("stock",), prefill_pp=2),
    ascend("mla_pp3", SEVEN_LAYERS_MLA, "wrong", prefill_pp=3),
    ascend("mla_pp2_tp2_to_2", SEVEN_LAYERS_MLA, "wrong", prefill_tp=2, prefill_pp=2, decode_tp=2),
    ascend("mla_pp2_tp2_to_1", SEVEN_LAYERS_MLA, "wrong", prefill_tp=2, prefill_pp=2),
    ascend("mla_dp2_to_dp2", SEVEN_LAYERS_MLA, "right", **DP_2, **TO_DP_2),
    ascend("mla_tp1_to_dp2", SEVEN_LAYERS_MLA, "right", **TO_DP_2),
    ascend("mla_dp2_to_tp1", SEVEN_LAYERS_MLA, "right", **DP_2),
    ascend("mla_pp2_to_dp2", SEVEN_LAYERS_MLA, "wrong", ("patched",), prefill_pp=2, **TO_DP_2),
    ascend("gqa_tp2_to_1", FOUR_HEADS, "right", prefill_tp=2),
    ascend("fia", FOUR_HEADS, "wrong", ("stock",), fia=True),
    ascend("fia_pp2_odd_layers", FIVE_LAYERS, "wrong", ("patched",), fia=True, prefill_pp=2),
    ascend("fia_tp2_to_1", FOUR_HEADS, "wrong", fia=True, prefill_tp=2),
    # 502 is the router's answer when decode has died.
    ascend("mla_retract", SEVEN_LAYERS_MLA, "http 502", ("stock",), retract=True),
    ascend("mla_pp2_retract", SEVEN_LAYERS_MLA, "http 502", retract=True, prefill_pp=2),
    ascend("gqa_retract", FOUR_HEADS, "http 502", retract=True),
    ascend("fia_retract", FOUR_HEADS, "wrong", ("patched",), fia=True, retract=True),
    ascend(
        "mla_pp2_to_pp2_retract",
        SEVEN_LAYERS_MLA,
        "http 502",
        (),
        prefill_pp=2,
        decode_pp=2,
        retract=True,
    ),
    full_pool("mla", SEVEN_LAYERS_MLA, "http 502"),
    full_pool("gqa", FOUR_HEADS, "http 502"),
    full_pool("mla_pp2", SEVEN_LAYERS_MLA, "http 502", prefill_pp=2),
]

# Where the stock engine serves alone, a fleet half of which is patched must serve too.
MIXED = [
    scenario
    for scenario in SCENARIOS
    if scenario.stock == "right" and scenario.topology.backend in ("nixl", "ascend")
]
