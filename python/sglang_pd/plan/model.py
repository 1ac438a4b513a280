"""Reads from a model's Hugging Face config.json what it keeps of each token."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_pd.errors import ExitCode, Refusal
from sglang_pd.patchset.patches import version_key
from sglang_pd.plan import hybrids
from sglang_pd.plan.hybrids import FULL, RECURRENT, WINDOW, RecurrentState

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
NESTED_CONFIGS = ("thinker_config", "text_config", "llm_config", "language_config")
KV_HEAD_KEYS = (
    *("n_head_kv", "num_kv_heads", "num_key_value_heads"),
    *("multi_query_group_num", "num_attention_groups"),
)
INDEX_BLOCK = 128  # elements of an index key that share a scale of 4 bytes


@dataclass(frozen=True)
class KVHeads:
    """Number of KV heads of the whole model, and elements per token of each in K and in V."""

    total: int
    k: int
    v: int


@dataclass(frozen=True)
class MLADims:
    """Elements that MLA keeps of a token: the latent, its RoPE part, and an index key (or 0)."""

    latent: int
    rope: int
    index: int = 0


@dataclass(frozen=True)
class Model:
    """What a model keeps, layer by layer."""

    name: str
    dtype: str  # of KV, by torch's name
    kinds: tuple[frozenset[str], ...]  # for each layer, any of FULL, WINDOW and RECURRENT
    attention: KVHeads | MLADims  # of layers with full attention
    window_heads: KVHeads | None = None  # of layers with a window in a separate pool
    window: int = 0  # tokens; 0 without such layers
    recurrent: RecurrentState | None = None

    @property
    def layers(self) -> int:
        return len(self.kinds)

    @property
    def itemsize(self) -> int:
        """Bytes per element of KV."""
        return ITEMSIZES[self.dtype]

    @property
    def is_mla(self) -> bool:
        return isinstance(self.attention, MLADims)

    @property
    def has_index(self) -> bool:
        return self.is_mla and self.attention.index > 0

    @property
    def kv_heads(self) -> int | None:
        """Number of KV heads; None if a page cannot be split by heads."""
        return None if self.is_mla else self.attention.total

    def layers_of_kind(self, kind: str, layers: range | None = None) -> list[int]:
        """Returns the numbers of the layers of this kind, among `layers` or all."""
        return [n for n in layers or range(self.layers) if kind in self.kinds[n]]

    @property
    def title(self) -> str:
        """A title such as `GQA, 64 layers, 8 KV heads, bfloat16`."""
        if self.is_mla:
            what = ["MLA with an indexer" if self.has_index else "MLA", f"{self.layers} layers"]
        else:
            what = ["GQA", f"{self.layers} layers", f"{self.attention.total} KV heads"]
        if self.window_heads:
            what.append(f"{len(self.layers_of_kind(WINDOW))} with a window of {self.window} tokens")
        if self.recurrent:
            what.append(f"{len(self.layers_of_kind(RECURRENT))} with recurrent state")
        return ", ".join([*what, self.dtype])


def read_model(path: Path, release: str) -> Model:
    """Reads a model from a config.json, or from its folder, as an engine release treats it.

    Raises Refusal NO_MODEL if there is none, or its pools are not supported here.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Refusal(
            ExitCode.NO_MODEL, f"cannot read {file}: {error}; pass a config.json"
        ) from error
    if not isinstance(config, dict):
        raise Refusal(
            ExitCode.NO_MODEL,
            f"{file} holds a {type(config).__name__} instead of a configuration; "
            "pass the config.json of a Hugging Face model",
        )
    name = file.parent.name if file.name == "config.json" else file.stem
    try:
        return config_to_model(config, name or "model", release)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Refusal(
            ExitCode.NO_MODEL,
            f"{file} lacks or has an invalid entry ({error!r}), without which the size of KV is "
            "unknown; pass the config.json of a Hugging Face model",
        ) from error


def config_to_model(config: Mapping[str, Any], name: str, release: str) -> Model:
    """Converts a parsed config.json. Raises Refusal NO_MODEL; KeyError or the like for gaps."""
    architecture = (config.get("architectures") or [""])[0]
    dtype = config.get("dtype") or config.get("torch_dtype")
    for inner in NESTED_CONFIGS:
        if isinstance(config.get(inner), Mapping):
            config = config[inner]
            dtype = config.get("dtype") or config.get("torch_dtype") or dtype
    dtype = str(dtype or "bfloat16").removeprefix("torch.")
    if dtype not in ITEMSIZES:
        raise hybrids.unsupported_model(f"dtype {dtype}")
    kinds = hybrids.layer_kinds(config, architecture, int(config["num_hidden_layers"]))
    first = hybrids.WINDOW_POOLS.get(architecture)
    keeps_windows = first is not None and version_key(first) <= version_key(release)
    if not keeps_windows:
        kinds = [{FULL if kind == WINDOW else kind for kind in layer} for layer in kinds]
    has_windows = any(WINDOW in layer for layer in kinds)
    is_recurrent = any(RECURRENT in layer for layer in kinds)
    return Model(
        name,
        dtype,
        tuple(map(frozenset, kinds)),
        _latent(config) if config.get("kv_lora_rank") else _heads(config),
        _window_heads(config) if has_windows else None,
        _window(config) if has_windows else 0,
        hybrids.recurrent_state(config) if is_recurrent else None,
    )


def _latent(config: Mapping[str, Any]) -> MLADims:
    index = config.get("index_head_dim") if config.get("index_topk") else 0
    return MLADims(int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"]), int(index or 0))


def _heads(config: Mapping[str, Any]) -> KVHeads:
    queries = int(config["num_attention_heads"])
    total = next((config[key] for key in KV_HEAD_KEYS if config.get(key)), queries)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        total = 1
    width = config.get("head_dim") or config.get("attention_head_dim")
    width = int(width or int(config["hidden_size"]) // queries)
    return KVHeads(int(total), width, int(config.get("v_head_dim") or width))


def _window_heads(config: Mapping[str, Any]) -> KVHeads:
    full, other = _heads(config), config.get("attention_other_setting") or {}
    total = config.get("swa_num_key_value_heads") or other.get("num_attention_groups")
    k = int(config.get("swa_head_dim") or full.k)
    v = int(config.get("swa_v_head_dim") or config.get("swa_head_dim") or full.v)
    return KVHeads(int(total or full.total), k, v)


def _window(config: Mapping[str, Any]) -> int:
    names = ("sliding_window_size", "sliding_window", "window_size", "attention_chunk_size")
    return int(next(config[name] for name in names if config.get(name)))
