"""The prompts that a check sends: every length at which something may go wrong."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Ids of tokens that are words or bytes in every vocabulary.
TOKENS = range(100, 250)
SUFFIXES = 3
SEED = 20


@dataclass(frozen=True)
class PromptGroup:
    """Prompts (token ids) that are sent at once, or one after the other."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    at_once: bool = False


def prompt_lengths(wanted: Sequence[int], page_size: int, chunk: int | None, longest: int) -> list:
    """Returns lengths in tokens, ascending: the wanted ones, and edges of pages and of chunks.

    Leaves out lengths above `longest`. `chunk` is None if prefill computes whole prompts.
    """
    edges = {pages * page_size + more for pages in (1, 2, 5) for more in (-1, 0, 1)}
    chunks = {chunk - 1, chunk, 2 * chunk + 1} if chunk else set()
    return sorted(n for n in {*wanted, *edges, *chunks} if 0 < n <= longest)


def prompt_groups(lengths: Sequence[int], page_size: int, requests: int) -> Iterator[PromptGroup]:
    """Yields the prompts: single ones, some that share a prefix, and a burst of `requests`."""
    rng = random.Random(SEED)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.choices(TOKENS, k=length))

    yield PromptGroup("one at a time", tuple(map(prompt, lengths)))
    longest = max(lengths)
    prefix = prompt(max(1, min(longest - 1, 3 * page_size + page_size // 2)))
    suffixes = [prompt(max(1, min(longest - len(prefix), page_size))) for _ in range(SUFFIXES)]
    yield PromptGroup("with a common prefix", tuple(prefix + suffix for suffix in suffixes))
    burst = tuple(prompt(rng.choice(lengths)) for _ in range(requests))
    yield PromptGroup("at once", burst, at_once=True)
