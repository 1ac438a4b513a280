"""Tiny models, made locally and never downloaded, whose output depends on the whole KV cache.

Weights are random with a wide range: with the usual range the output repeats one token, which hides
corruption.  Weights are float32, so that the logprobs of TP 1, 2 and 4 agree to three decimals and
one server can be the reference for all.
"""

import abc
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

VOCABULARY = 320  # 256 bytes and the end token, rounded up to a multiple of 64
END = "<|end|>"
CONTEXT = 4096  # tokens


@dataclasses.dataclass(frozen=True)
class TinyModel(abc.ABC):
    """Parameters of all models: ``heads`` are query heads, ``hidden`` is the width of a token.

    ``later_weight`` scales the output of all layers after the first: if it is small, a draft model
    of the first layer alone predicts some tokens (`pd_harness.cpu_host.drafts`).
    """

    family: ClassVar[str]
    cache: ClassVar[str]  # format of the KV cache's part of the name

    layers: int = 4
    heads: int = 4
    hidden: int = 128
    seed: int = 0
    later_weight: float = 1.0

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder, which contains every parameter."""
        cache = self.cache.format_map(vars(self))
        later_weight = "" if self.later_weight == 1 else f"-later{self.later_weight:g}"
        sizes = f"l{self.layers}-h{self.heads}-{cache}-e{self.hidden}"
        return f"{self.family}-{sizes}-s{self.seed}{later_weight}"

    @abc.abstractmethod
    def network(self, **common):
        """A transformers model with random weights; ``common`` are options of its config."""

    def make(self, folder: Path) -> Path:
        """The checkpoint's folder below ``folder``; writes the checkpoint if it does not exist."""
        return write_atomically(folder / self.name, self._write)

    def _write(self, folder: Path) -> None:
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = self.network(
                vocab_size=VOCABULARY,
                hidden_size=self.hidden,
                intermediate_size=2 * self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                max_position_embeddings=CONTEXT,
                initializer_range=0.25,
                tie_word_embeddings=False,
                eos_token_id=256,
                pad_token_id=256,
                dtype="float32",
            )
        for layer in network.model.layers[1:]:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.data *= self.later_weight
        network.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)


@dataclasses.dataclass(frozen=True)
class TinyGQA(TinyModel):
    """Grouped-query attention of the Qwen3 family with ``kv_heads`` KV heads."""

    family = "qwen3"
    cache = "kv{kv_heads}-d{head_dim}"

    kv_heads: int = 4
    head_dim: int = 64

    def network(self, **common):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(num_key_value_heads=self.kv_heads, head_dim=self.head_dim, **common)
        return Qwen3ForCausalLM(config)


@dataclasses.dataclass(frozen=True)
class TinyLlama(TinyGQA):
    """Grouped-query attention of the Llama family, which has EAGLE drafts.

    Queries are about as small as Qwen3's norm makes them: with larger queries a token attends to
    one other token alone, and most of the cache does not matter.
    """

    family = "llama"

    def network(self, **common):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(num_key_value_heads=self.kv_heads, head_dim=self.head_dim, **common)
        network = LlamaForCausalLM(config)
        for layer in network.model.layers:
            layer.self_attn.q_proj.weight.data /= 8
        return network


@dataclasses.dataclass(frozen=True)
class TinyMLA(TinyModel):
    """Multi-head latent attention of the DeepSeek-V2 family, every layer dense.

    The cache has ``latent`` + ``rope`` elements per token and layer; ``head_dim`` is the width of
    a head's value, and of its key without the RoPE part.
    """

    family = "deepseek2"
    cache = "c{latent}-r{rope}-d{head_dim}"

    latent: int = 64
    rope: int = 32
    head_dim: int = 32

    def network(self, **common):
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        config = DeepseekV2Config(
            kv_lora_rank=self.latent,
            q_lora_rank=None,
            qk_nope_head_dim=self.head_dim,
            qk_rope_head_dim=self.rope,
            v_head_dim=self.head_dim,
            first_k_dense_replace=self.layers,
            moe_layer_freq=1,  # read by the engine, not by transformers
            **identity_yarn(),
            **common,
        )
        return DeepseekV2ForCausalLM(config)


def load_checkpoint(folder: Path):
    """The transformers model of a checkpoint, as a reference.

    Does not use ``from_pretrained``: with transformers 5 and the CPU host it leaves RoPE's
    frequencies uninitialized.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval()


def identity_yarn() -> dict[str, dict]:
    """YaRN, the only RoPE that the engine supports for MLA on a CPU; factor 1 makes it plain RoPE.

    transformers 4 reads ``rope_scaling``, transformers 5 ``rope_parameters``.
    """
    import transformers

    kind = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": CONTEXT}
    if int(transformers.__version__.split(".")[0]) < 5:
        return {"rope_scaling": kind}
    return {"rope_parameters": {**kind, "rope_theta": 10_000.0}}


def write_atomically(target: Path, write: Callable[[Path], None]) -> Path:
    """The folder ``target``; if it does not exist, ``write(folder)`` writes its files.

    The folder appears atomically, even if two processes make it at once.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(unfinished)
        os.rename(unfinished, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def byte_tokenizer():
    """A tokenizer with one token per byte (0-255), an end token (256), and unused ones.

    Each token decodes to its own printable character (bytes to those of byte-level BPE's
    alphabet), so two answers have equal tokens exactly if their texts are equal.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    unused = [chr(ord("А") + i) for i in range(VOCABULARY - len(alphabet) - 1)]
    ids = {character: i for i, character in enumerate([*alphabet, END, *unused])}
    tokenizer = Tokenizer(models.BPE(ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
