"""Scenarios of the serving tests: topologies, tiny models, and each stock engine's outcome."""

import dataclasses
import functools
import random
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest

from pd_harness.cluster import NPU_PAGE_SIZE, RELEASE_ENV, Topology
from pd_harness.cpu_host.models import TinyGQA, TinyLlama, TinyMLA, TinyModel
from pd_harness.device import device
from pd_harness.releases import release


class HalfPrecisionWeights:
    """Mixin for models with weights from a range in which half precision seldom changes a token.

    With these weights, a float16 logprob is within 0.011 of float32's. With the usual weights it
    is within 3.9, and a quarter of the tokens differ. Swapped layers or heads of KV still change
    a logprob by 0.4 or more.
    """

    @property
    def name(self) -> str:
        return f"{super().name}-mild"

    def network(self, **common):
        return super().network(**{**common, "initializer_range": 0.08})


@dataclasses.dataclass(frozen=True)
class NpuGQA(HalfPrecisionWeights, TinyGQA):
    """A GQA model for an NPU."""


@dataclasses.dataclass(frozen=True)
class NpuMLA(HalfPrecisionWeights, TinyMLA):
    """An MLA model for an NPU, whose attention requires the widths of DeepSeek's models."""

    latent: int = 512
    rope: int = 64
    head_dim: int = 128


GQA, MLA = (NpuGQA, NpuMLA) if device() == "npu" else (TinyGQA, TinyMLA)
FOUR_HEADS = GQA(layers=4, kv_heads=4)
TWO_HEADS = GQA(layers=4, kv_heads=2)
ONE_HEAD = GQA(layers=4, kv_heads=1)
SIX_HEADS = GQA(heads=6, kv_heads=6, hidden=192)
FIVE_LAYERS = GQA(layers=5, kv_heads=4)
SEVEN_LAYERS = GQA(layers=7, kv_heads=4)
SEVEN_LAYERS_MLA = MLA(layers=7)

NEW_TOKENS = 12
# From one token to many pages; the longest prompt is prefilled and sent in three chunks.
PROMPT_LENGTHS = (1, 7, 16, 33, 150, 600)
LONG_PROMPT = 1500
PAGE_SIZE = NPU_PAGE_SIZE if device() == "npu" else 16  # of scenarios over `ascend`


def prompts() -> list[list[int]]:
    """Returns prompts of token ids that share no prefix and are the same in every run."""
    source = random.Random(0)
    return [[source.randrange(256) for _ in range(length)] for length in PROMPT_LENGTHS]


def long_prompt(seed: int) -> list[int]:
    """Returns token ids that are prefilled and sent in many chunks.

    Use another seed for each request, because prefill's radix cache keeps computed prompts. The
    prompt is no longer than necessary, because prefill computes all of it before it reports that
    decode is dead.
    """
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(LONG_PROMPT)]


def page_count(lengths: Iterable[int], page_size: int) -> int:
    """Returns the pages that requests of these lengths, in tokens, need."""
    return sum(-(-length // page_size) for length in lengths)


def long_answer(page_size: int) -> int:
    """Returns a length in tokens at which all prompts decode at once, and each needs new pages."""
    return max(64, 2 * page_size)


def pool_tokens(page_size: int, answer: int) -> int:
    """Returns a pool size in tokens that fits all prompts and one answer, but not all answers.

    A single running request can finish while the other prompts wait.
    """
    longest = max(
        page_count([length + answer], page_size) - page_count([length], page_size)
        for length in PROMPT_LENGTHS
    )
    return (page_count(PROMPT_LENGTHS, page_size) + longest + 1) * page_size


def shared_prefix_prompts() -> list[list[int]]:
    """Returns prompts that share prefixes, some ending at a page boundary, some within a page."""
    source = random.Random(7)
    trunk = [source.randrange(256) for _ in range(300)]
    lengths = (300, 16, 17, 150, 256, 299)
    return [
        [*trunk[:length], *(source.randrange(256) for _ in range(20 * turn))]
        for turn, length in enumerate(lengths)
    ]


def model_folder(model: TinyModel) -> Path:
    """Returns the folder of the model's checkpoint, which is made on first use."""
    return model.make(RELEASE_ENV / "models")


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """Takes the place of an outcome if a release cannot run a scenario; says why."""

    reason: str


RELEASES = ("0.5.9", "0.5.18", "0.5.23")  # columns of a scenario's outcomes
NO_STAGING = Unsupported("0.5.9 has no staging buffers")
NO_CPU_STAGING = Unsupported("0.5.18 has staging buffers on GPUs only")
NO_PREFIXES = Unsupported("0.5.9's decode keeps no prefixes")


def moves_heads(size: Topology, model: TinyModel, *engines: str) -> str:
    """Returns which side packs or interleaves KV heads: `prefill`, `decode`, or neither.

    Args:
        engines: Prefill's engine, and decode's.
    """
    ranks = (size.prefill_tp // size.prefill_dp, size.decode_tp // size.decode_dp)
    heads = getattr(model, "kv_heads", 1)  # MLA has none to split
    prefill, decode = (max(1, heads // count) for count in ranks)
    if prefill == decode or size.staging:
        return ""
    packs = prefill > decode
    needed = engines[:1] if packs else engines
    side = "prefill" if packs else "decode"
    return side if set(needed) == {"patched"} else ""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A fleet with a model and prompts, and its outcomes.

    An outcome is "right", "wrong", "hang", "http NUMBER", or "dead" if a server has exited.

    Attributes:
        outcomes: Outcomes on the stock engines of `RELEASES`.
        patched: The outcome on the patched engine.
        new_tokens: Tokens of each answer.
        make_prompts: Returns the prompts.
        times: How often the prompts are sent.
        packed: False sets `SGLANG_PD_PACKED=0` on both servers.
        stray_message: Sent to each prefill rank before the prompts, if not None.
        sides: Roles of the servers that have a draft model.
    """

    name: str
    topology: Topology
    model: TinyModel
    outcomes: tuple[str | Unsupported, ...]
    patched: str = "right"
    new_tokens: int = NEW_TOKENS
    make_prompts: Callable[[], list[list[int]]] = prompts
    times: int = 1
    packed: bool = True
    stray_message: bytes | None = None
    sides: tuple[str, ...] = ()

    @property
    def stock(self) -> str | Unsupported:
        """The outcome on this release's stock engine."""
        return self.outcomes[RELEASES.index(release())]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of both servers."""
        return {} if self.packed else {"SGLANG_PD_PACKED": "0"}

    def moves_heads(self, *engines: str) -> str:
        """Returns which side packs or interleaves KV heads: `prefill`, `decode`, or neither.

        Args:
            engines: Prefill's engine, and decode's.
        """
        return moves_heads(self.topology, self.model, *engines) if self.packed else ""

    @property
    def unsupported_reason(self) -> str | None:
        """Why this release cannot run it; None if it can."""
        return self.stock.reason if isinstance(self.stock, Unsupported) else None


def scenario(
    backend: str, name: str, model: TinyModel, *outcomes: str | Unsupported, **sizes
) -> Scenario:
    if backend == "ascend":
        sizes = {"page_size": PAGE_SIZE, **sizes}
    return Scenario(f"{backend}-{name}", Topology(backend, **sizes), model, outcomes)


nixl = functools.partial(scenario, "nixl")
mooncake = functools.partial(scenario, "mooncake")
ascend = functools.partial(scenario, "ascend")


def full_pool(name: str, model: TinyModel, *outcomes: str, page_size=PAGE_SIZE, **sizes):
    answer = long_answer(page_size)
    sizes |= {"page_size": page_size, "decode_tokens": pool_tokens(page_size, answer)}
    made = ascend(f"{name}_full_pool", model, *outcomes, **sizes)
    return dataclasses.replace(made, new_tokens=answer)


def incompatible(scenario: Scenario) -> Scenario:
    """Returns a scenario of an incompatible pair: requests are refused, and both servers live."""
    return dataclasses.replace(scenario, patched="http 500")


def with_stray_message(scenario: Scenario, stray: bytes) -> Scenario:
    return dataclasses.replace(scenario, stray_message=stray)


def with_prefixes(scenario: Scenario) -> Scenario:
    """Sends the prompts twice: decode keeps the first time's prefixes, prefill sends the rest."""
    return dataclasses.replace(scenario, make_prompts=shared_prefix_prompts, times=2)


def sliced(scenario: Scenario) -> Scenario:
    """Sends KV heads between TP sizes token by token."""
    return dataclasses.replace(scenario, name=f"{scenario.name}_sliced", packed=False)


# DP attention: two groups of TP ranks, each with its own requests.
DP_2 = {"prefill_tp": 2, "prefill_dp": 2}
TO_DP_2 = {"decode_tp": 2, "decode_dp": 2}
PP_2_DP_2 = {"prefill_pp": 2, **DP_2, **TO_DP_2}
RETRACT_PP_2 = {"prefill_pp": 2, "decode_pp": 2, "retract": True}
PAGES_16_TO_32 = {"page_size": 16, "decode_page_size": 32}
TP_2_TO_2 = {"prefill_tp": 2, "decode_tp": 2}
TP_2_TO_4 = {"prefill_tp": 2, "decode_tp": 4}
PREFIXES = {"decode_prefixes": True}
PREFIXES_16 = {**PREFIXES, "page_size": 16}

TABLE = [
    nixl("tp2_to_1", FOUR_HEADS, "hang", "right", "right", prefill_tp=2, page_size=16),
    nixl("tp4_to_1_replicated", TWO_HEADS, "hang", "right", "right", prefill_tp=4),
    nixl("tp1_to_4_replicated", TWO_HEADS, "dead", "right", "right", decode_tp=4),
    nixl("tp2_to_4_replicated", TWO_HEADS, "dead", "right", "right", **TP_2_TO_4, page_size=16),
    nixl("tp2_to_4_one_head", ONE_HEAD, "dead", "hang", "hang", **TP_2_TO_4),
    nixl("pp2_tp2_to_1", SEVEN_LAYERS, "hang", "wrong", "wrong", prefill_tp=2, prefill_pp=2),
    nixl("pp2_odd_layers", SEVEN_LAYERS, "wrong", "hang", "hang", prefill_pp=2),
    nixl("tp1_to_1", FOUR_HEADS, "right", "right", "right", page_size=16),
    nixl("tp2_to_2", FOUR_HEADS, "right", "right", "right", **TP_2_TO_2),
    nixl("tp1_to_2", FOUR_HEADS, "right", "right", "right", decode_tp=2, page_size=128),
    nixl("pp2_even_layers", FOUR_HEADS, "right", "hang", "hang", prefill_pp=2, page_size=16),
    # Clients request logprobs, of which decode's last stage has none at first.
    nixl("dp2_to_dp2", FIVE_LAYERS, "right", "right", "right", **DP_2, **TO_DP_2),
    nixl("tp4_dp2_to_1", FIVE_LAYERS, "hang", "right", "right", prefill_tp=4, prefill_dp=2),
    nixl("pp2_to_dp2", FIVE_LAYERS, "wrong", "hang", "hang", prefill_pp=2, **TO_DP_2),
    nixl("pp2_to_pp2", FIVE_LAYERS, "dead", "right", "right", prefill_pp=2, decode_pp=2),
    mooncake("tp1_to_1", FOUR_HEADS, "right", "right", "right", page_size=16),
    mooncake("tp2_to_1", FOUR_HEADS, "right", "right", "right", prefill_tp=2),
    mooncake("tp1_to_2", FOUR_HEADS, "right", "right", "right", decode_tp=2, page_size=16),
    mooncake("tp4_to_1_replicated", TWO_HEADS, "wrong", "right", "right", prefill_tp=4),
    mooncake("tp1_to_4_replicated", TWO_HEADS, "hang", "right", "right", decode_tp=4),
    mooncake("tp2_to_4_replicated", TWO_HEADS, "hang", "right", "right", **TP_2_TO_4),
    mooncake("tp2_to_4_one_head", ONE_HEAD, "hang", "right", "right", **TP_2_TO_4),
    mooncake("pp2_tp2_to_1", SEVEN_LAYERS, "wrong", "wrong", "wrong", prefill_tp=2, prefill_pp=2),
    mooncake("pp2_odd_layers", SEVEN_LAYERS, "wrong", "wrong", "wrong", prefill_pp=2),
    mooncake("pp2_even_layers", FOUR_HEADS, "right", "right", "right", prefill_pp=2, page_size=16),
    ascend("mla_pp1", SEVEN_LAYERS_MLA, "right", "right", "right"),
    ascend("mla_pp2", SEVEN_LAYERS_MLA, "wrong", "right", "right", prefill_pp=2),
    ascend("mla_pp3", SEVEN_LAYERS_MLA, "wrong", "right", "right", prefill_pp=3),
    ascend(
        "mla_pp2_tp2_to_2", SEVEN_LAYERS_MLA, "wrong", "right", "right", prefill_pp=2, **TP_2_TO_2
    ),
    ascend(
        "mla_pp2_tp2_to_1", SEVEN_LAYERS_MLA, "wrong", "right", "right", prefill_tp=2, prefill_pp=2
    ),
    ascend("mla_dp2_to_dp2", SEVEN_LAYERS_MLA, "right", "right", "right", **DP_2, **TO_DP_2),
    ascend("mla_tp1_to_dp2", SEVEN_LAYERS_MLA, "right", "right", "right", **TO_DP_2),
    ascend("mla_dp2_to_tp1", SEVEN_LAYERS_MLA, "right", "right", "right", **DP_2),
    ascend("mla_pp2_to_dp2", SEVEN_LAYERS_MLA, "wrong", "right", "right", prefill_pp=2, **TO_DP_2),
    ascend("mla_pp2_dp2_to_dp2", SEVEN_LAYERS_MLA, "wrong", "right", "right", **PP_2_DP_2),
    ascend("gqa_tp2_to_1", FOUR_HEADS, "right", "right", "right", prefill_tp=2),
    ascend("gqa_pp2_odd_layers", FIVE_LAYERS, "wrong", "wrong", "wrong", prefill_pp=2),
    ascend("fia", FOUR_HEADS, "wrong", "right", "right", fia=True),
    ascend("fia_pp2_odd_layers", FIVE_LAYERS, "wrong", "wrong", "wrong", fia=True, prefill_pp=2),
    ascend("fia_tp2_to_1", FOUR_HEADS, "wrong", "right", "right", fia=True, prefill_tp=2),
    ascend("mla_retract", SEVEN_LAYERS_MLA, "dead", "right", "right", retract=True),
    ascend(
        "mla_pp2_retract", SEVEN_LAYERS_MLA, "dead", "right", "right", retract=True, prefill_pp=2
    ),
    ascend("gqa_retract", FOUR_HEADS, "dead", "right", "right", retract=True),
    ascend(
        "gqa_tp2_to_1_retract", FOUR_HEADS, "dead", "right", "right", prefill_tp=2, retract=True
    ),
    ascend("fia_retract", FOUR_HEADS, "wrong", "right", "right", fia=True, retract=True),
    ascend("mla_pp2_to_pp2_retract", SEVEN_LAYERS_MLA, "dead", "right", "right", **RETRACT_PP_2),
    full_pool("mla", SEVEN_LAYERS_MLA, "dead", "right", "right"),
    full_pool("gqa", FOUR_HEADS, "dead", "right", "right"),
    full_pool("mla_npu_pages", SEVEN_LAYERS_MLA, "dead", "right", "right", page_size=NPU_PAGE_SIZE),
    full_pool("mla_pp2", SEVEN_LAYERS_MLA, "dead", "right", "right", prefill_pp=2),
    incompatible(nixl("pages_16_to_32", FOUR_HEADS, "dead", "dead", "dead", **PAGES_16_TO_32)),
    incompatible(mooncake("pages_16_to_32", FOUR_HEADS, "dead", "dead", "dead", **PAGES_16_TO_32)),
    incompatible(nixl("tp3_to_2", SIX_HEADS, "hang", "hang", "hang", prefill_tp=3, decode_tp=2)),
    with_stray_message(nixl("stray_hello", FOUR_HEADS, "hang", "hang", "hang"), b"hello"),
    with_stray_message(mooncake("stray_bytes", FOUR_HEADS, "hang", "hang", "hang"), b"\xff\xfe"),
    mooncake(
        "staging_tp2_to_1",
        FOUR_HEADS,
        NO_STAGING,
        NO_CPU_STAGING,
        "right",
        prefill_tp=2,
        staging=True,
    ),
    nixl(
        "staging_tp2_to_1",
        FOUR_HEADS,
        NO_STAGING,
        NO_CPU_STAGING,
        "right",
        prefill_tp=2,
        staging=True,
    ),
    with_prefixes(nixl("prefixes", FOUR_HEADS, NO_PREFIXES, "right", "right", **PREFIXES_16)),
    with_prefixes(mooncake("prefixes", FOUR_HEADS, NO_PREFIXES, "right", "right", **PREFIXES_16)),
    *(
        with_prefixes(nixl(name, FOUR_HEADS, NO_PREFIXES, "right", "right", **PREFIXES_16, **sizes))
        for name, sizes in (
            ("prefixes_tp2_to_1", {"prefill_tp": 2}),
            ("prefixes_tp1_to_2", {"decode_tp": 2}),
        )
    ),
    with_prefixes(
        ascend("mla_prefixes", SEVEN_LAYERS_MLA, NO_PREFIXES, "right", "right", **PREFIXES)
    ),
]
SCENARIOS = [scenario for scenario in TABLE if not scenario.unsupported_reason]

PACKED = [
    one for one in SCENARIOS if one.patched == "right" and one.moves_heads("patched", "patched")
]
SLICED = [sliced(one) for one in PACKED[::2]]  # test/transport has all ways

# Where the stock engine is right, a fleet with one patched side must be right, too.
MIXED = [
    scenario
    for scenario in SCENARIOS
    if scenario.stock == "right" and scenario.topology.backend in ("nixl", "ascend")
]

# Scenarios that run without --nightly, by release and test.
PUSH_CASES = {
    "0.5.9": {
        "stock": {"mooncake-pp2_odd_layers"},
        "patched": {"nixl-pp2_to_pp2", "ascend-fia_pp2_odd_layers"},
        "mixed": set(),
    },
    "0.5.18": {
        "stock": set(),
        "patched": {"nixl-pp2_odd_layers"},
        "mixed": set(),
    },
    "0.5.23": {
        "stock": {"mooncake-pp2_odd_layers"},
        "patched": {
            "ascend-mla_pp2",
            "ascend-fia_pp2_odd_layers",
            "ascend-fia_retract",
            "nixl-tp2_to_4_one_head",
            "nixl-pp2_odd_layers",
            "mooncake-pp2_odd_layers",
        },
        "mixed": set(),
    },
}


def marks(one: Scenario, always: Collection[str]) -> list[pytest.MarkDecorator]:
    """Returns the marks of its test, which every run has if its name is in ``always``."""
    if one.unsupported_reason:
        return [pytest.mark.skip(reason=one.unsupported_reason)]
    return [] if one.name in always else [pytest.mark.nightly]


LLAMA = TinyLlama(layers=4, later_weight=0.1)
DRAFTED_MLA = TinyMLA(layers=4, later_weight=0.1)
PREFILL, DECODE = ("prefill",), ("decode",)
SIDES = PREFILL + DECODE
NO_STAGES = Unsupported("0.5.9 and 0.5.18 do not speculate in pipeline stages")


def llama(
    name: str, sides, *outcomes: str | Unsupported, backend: str = "nixl", **sizes
) -> Scenario:
    made = scenario(backend, name, LLAMA, *outcomes, **sizes)
    return dataclasses.replace(made, sides=sides)


def deepseek(name: str, sides, *outcomes: str | Unsupported, **sizes) -> Scenario:
    return dataclasses.replace(ascend(f"mla_{name}", DRAFTED_MLA, *outcomes, **sizes), sides=sides)


DRAFT_SCENARIOS = [
    llama("both", SIDES, "right", "right", "right", page_size=16),
    llama("both_tp2_to_1", SIDES, "hang", "right", "right", prefill_tp=2),
    llama("both", SIDES, "right", "right", "right", backend="mooncake", page_size=16),
    llama("both_tp2_to_1", SIDES, "right", "right", "right", backend="mooncake", prefill_tp=2),
    llama("both_tp1_to_2", SIDES, "right", "right", "right", backend="mooncake", decode_tp=2),
    llama("both_pp2", SIDES, NO_STAGES, NO_STAGES, "hang", prefill_pp=2, page_size=16),
    llama("decode_alone", DECODE, "right", "right", "right"),
    llama("decode_alone_pp2", DECODE, "right", "hang", "hang", prefill_pp=2, page_size=16),
    llama("prefill_alone", PREFILL, "dead", "hang", "hang"),
    deepseek("both", SIDES, "right", "right", "right"),
    deepseek("both_tp2_to_1", SIDES, "right", "right", "right", prefill_tp=2),
    deepseek("both_pp2", SIDES, NO_STAGES, NO_STAGES, "right", prefill_pp=2),
    deepseek("decode_alone", DECODE, "right", "right", "right"),
    deepseek("decode_alone_pp2", DECODE, "wrong", "right", "right", prefill_pp=2),
]
