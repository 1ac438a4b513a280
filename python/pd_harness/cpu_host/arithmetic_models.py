"""Tiny models that can add, trained locally, for measuring accuracy.

They answer sums in the format of the engine's GSM8K script, after one or more examples. Training
takes minutes; the checkpoint is kept like the other models'.
"""

import dataclasses
import json
import random
from pathlib import Path

from pd_harness.cpu_host.models import TinyGQA, TinyMLA, byte_tokenizer

MAX_ADDEND = 19
TRAINING_STEPS = 1200
BATCH = 32  # texts of SHOTS + 1 sums
SHOTS = 1
IGNORED_LABEL = -100  # excluded from the loss


def addition_problems(count: int, seed: int) -> list[dict[str, str]]:
    """Questions and answers in the format of GSM8K's rows."""
    source = random.Random(seed)
    pairs = [(source.randint(0, MAX_ADDEND), source.randint(0, MAX_ADDEND)) for _ in range(count)]
    return [{"question": f"{a}+{b}?", "answer": str(a + b)} for a, b in pairs]


def write_problems(file: Path, count: int) -> None:
    """Write ``count`` rows for the engine's script; the first row is the example."""
    file.write_text("".join(json.dumps(row) + "\n" for row in addition_problems(count, seed=0)))


@dataclasses.dataclass(frozen=True)
class ArithmeticGQA(TinyGQA):
    """A GQA model that adds, with two KV heads so that four TP ranks replicate them."""

    kv_heads: int = 2
    head_dim: int = 32

    @property
    def name(self) -> str:
        return f"{super().name}-adds"

    def network(self, **common):
        return train(super().network(**with_trainable_range(common)), self.seed)


@dataclasses.dataclass(frozen=True)
class ArithmeticMLA(TinyMLA):
    """An MLA model that adds, with five layers so that two PP stages have unequal lengths."""

    layers: int = 5

    @property
    def name(self) -> str:
        return f"{super().name}-adds"

    def network(self, **common):
        return train(super().network(**with_trainable_range(common)), self.seed)


def with_trainable_range(common: dict) -> dict:
    """``common`` with a range of initial weights that training can start from."""
    return {**common, "initializer_range": 0.02}


def train(network, seed: int):
    """Train the network on sums; the loss excludes the questions, which nothing can predict."""
    import torch

    tokenizer, source = byte_tokenizer(), random.Random(seed + 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=TRAINING_STEPS)
    network.train()
    for _ in range(TRAINING_STEPS):
        tokens, labels = _batch(tokenizer, source)
        loss = network(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return network.eval()


def _batch(tokenizer, source: random.Random):
    """Token ids and labels, [BATCH, longest text]."""
    import torch

    ids, labels = [], []
    for _ in range(BATCH):
        of_text, to_learn = [], []
        for row in addition_problems(SHOTS + 1, source.randrange(2**32)):
            answer = f"\nAnswer: {row['answer']}\n\nQuestion: "
            for part, is_learnt in ((row["question"], False), (answer, True)):
                tokens = tokenizer(part)["input_ids"]
                of_text += tokens
                to_learn += tokens if is_learnt else [IGNORED_LABEL] * len(tokens)
        start = tokenizer("Question: ")["input_ids"]
        ids.append(torch.tensor(start + of_text))
        labels.append(torch.tensor(start + to_learn))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=IGNORED_LABEL)
