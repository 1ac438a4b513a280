"""Tiny models, made on the spot and never downloaded, whose output depends on the whole KV cache.

Weights are random with a wide range: with the usual range the output is one token repeated, which
hides corruption.  They are float32, so that TP 1, 2 and 4 agree to three decimals in logprobs and
one server can be the reference for all.
"""

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

VOCABULARY = 320  # 256 bytes and the end token, rounded up to a multiple of 64
END = "<|end|>"
CONTEXT = 4096  # tokens


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """Grouped-query attention of the Qwen3 family; ``heads`` query heads, ``kv_heads`` KV heads."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    hidden: int = 128
    seed: int = 0

    @property
    def name(self) -> str:
        return (
            f"qwen3-l{self.layers}-h{self.heads}-kv{self.kv_heads}-d{self.head_dim}"
            f"-e{self.hidden}-s{self.seed}"
        )

    def make(self, folder: Path) -> Path:
        """Folder of the checkpoint below ``folder``, written there first if it is not yet.

        It appears whole or not at all, also when two processes make it at once.
        """
        target = folder / self.name
        if target.is_dir():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{self.name}-", dir=folder))
        try:
            self._write(draft)
            os.rename(draft, target)
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    def _write(self, folder: Path) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT,
            initializer_range=0.25,
            tie_word_embeddings=False,
            eos_token_id=256,
            pad_token_id=256,
            dtype="float32",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            Qwen3ForCausalLM(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)


def byte_tokenizer():
    """A tokenizer with one token per byte (0-255), an end token (256), and unused ones.

    Each token reads as a single printable character of its own, bytes as in the alphabet of
    byte-level BPE, so two answers have equal tokens exactly if their texts are equal.
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
