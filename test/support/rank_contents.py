"""What a request writes into a rank's KV pools and metadata rows, byte for byte."""

from collections.abc import Collection
from types import SimpleNamespace

import numpy as np
import torch
from rank_pools import (
    MAMBA_SLOTS,
    STATE_SIZE,
    WINDOW_PAGES,
    SparseKVPool,
    make_pool,
    pool_buffers,
    pool_layers,
    state_rows,
)

AUX_SLOTS = 8
UNWRITTEN = 0xA5
NO_LAYER = 64
COMPONENTS = (
    *("k", "v", "kv", "index_k", "state", "state_k", "state_v"),
    *("state_conv", "state_temporal"),
)
METADATA_ROWS = (
    *("output_ids", "cached_tokens"),
    *("output_token_logprobs_val", "output_token_logprobs_idx"),
    *("output_top_logprobs_val", "output_top_logprobs_idx"),
    *("output_topk_p", "output_topk_index", "output_hidden_states", "bootstrap_room"),
)
HIDDEN_STATES = METADATA_ROWS.index("output_hidden_states")


def heads_by_rank(total: int, ranks: int) -> list[list[int]]:
    """Returns each rank's KV heads; with fewer heads than ranks, consecutive ranks share a head."""
    if total >= ranks:
        return [hand.tolist() for hand in np.array_split(np.arange(total), ranks)]
    return [[head] for head in range(total) for _ in range(ranks // total)]


def decode_slot(room: int) -> int:
    """Returns decode's metadata slot of a room; prefill uses another slot."""
    return (room + 3) % AUX_SLOTS


class KVContents:
    """A rank's pools, whose elements encode where they belong; `c` is the rank's configuration.

    Attributes:
        pool: The target model's pool.
        draft: The draft model's pool, or None.
        expected: What the buffers must hold, by (component, is draft, layer).
    """

    def __init__(self, c: SimpleNamespace):
        self.config = c
        self.is_recurrent = c.hybrid in STATE_SIZE
        self.heads = {
            False: heads_by_rank(c.kv_heads, c.tp_size)[c.tp_rank],
            True: heads_by_rank(c.draft_heads, c.tp_size)[c.tp_rank],
        }
        self.window_heads = heads_by_rank(c.window_heads or c.kv_heads, c.tp_size)[c.tp_rank]
        self.pool = make_pool(c, pool_layers(c), len(self.heads[False]), len(self.window_heads))
        drafts, heads = range(c.draft_layers), len(self.heads[True])
        self.draft = make_pool(c, drafts, heads, heads) if drafts else None
        self.expected: dict[tuple, np.ndarray] = {}

    def buffers(self):
        """Yields ((component, is draft, layer), tensor) per buffer of `rank_pools.pool_buffers`."""
        for is_draft, pool in ((False, self.pool), (True, self.draft)):
            if pool is not None:
                for (component, layer), buffer in pool_buffers(pool):
                    yield (component, is_draft, layer), buffer

    def snapshot(self) -> dict[tuple, np.ndarray]:
        return {key: buffer.numpy(force=True).copy() for key, buffer in self.buffers()}

    def rebaseline(self) -> None:
        """Takes the buffers' current contents as right."""
        self.expected = self.snapshot()

    def fill(self, room: int, pages: list[int]) -> None:
        """Writes prefill's result: this rank's heads of every token in the request's pages.

        A layer that this rank's stage does not compute gets values that no layer has.
        """
        for (component, is_draft, layer), buffer in self.buffers():
            array = buffer.cpu().numpy()
            computed = is_draft or self._is_of_stage(layer) or self.config.hybrid != "swa"
            encoded = layer if computed else layer + NO_LAYER
            self._write(array, (component, is_draft, encoded), room, pages)
            buffer.copy_(torch.from_numpy(array))

    def expect(self, room: int, pages: list[int]) -> None:
        """Adds to `expected` what prefill sends of a request."""
        for key, array in self.expected.items():
            _, is_draft, layer = key
            is_sent = layer < self.config.sent_drafts if is_draft else self._is_of_stage(layer)
            if is_sent:
                self._write(array, key, room, pages)

    def unexpected(self) -> list[str]:
        """Returns a description of each buffer that differs from `expected`."""
        arrived = {key: buffer.cpu().numpy() for key, buffer in self.buffers()}
        return [
            f"{key}: {int((array != self.expected[key]).sum())} of {array.size} elements"
            for key, array in arrived.items()
            if not np.array_equal(array, self.expected[key])
        ]

    def state_slots(self, room: int, pages: list[int]) -> list[int] | None:
        """Returns the request's state indices; None without state.

        With index keys these are its pages, with a sliding window its last pages' indices in the
        window pool, with recurrent state one slot.
        """
        if self.config.hybrid == "swa":
            return [self.config.pages - page for page in pages[-WINDOW_PAGES:]]
        if self.is_recurrent:
            return [1 + (room if self.config.role == "prefill" else room + 3) % MAMBA_SLOTS]
        return pages if isinstance(self.pool, SparseKVPool) else None

    def _is_of_stage(self, layer: int) -> bool:
        return 0 <= layer - self.config.start_layer < self.config.layers

    def _write(self, buffer: np.ndarray, key: tuple, room: int, pages: list[int]) -> None:
        """Writes elements that encode room, component, model, layer, head, token and element."""
        component, is_draft, layer = key
        if component.startswith("state"):
            pages = self.state_slots(room, pages)
        number = COMPONENTS.index(component) * 2 + is_draft
        if buffer.dtype == np.uint8:
            rows = np.zeros(1, int)
            if self.is_recurrent:
                rows = state_rows(self.config, component, buffer.shape[1])
            for i, page in enumerate(pages):
                start = room * 7 + layer * 31 + i * 13 + number * 59 + rows[:, None] * 101
                values = (start + np.arange(buffer.shape[-1])) % 251
                buffer[page] = values if self.is_recurrent else values[0]
            return
        heads = [0] if self.config.mla else self.heads[is_draft]
        if component.startswith("state") and not is_draft:
            heads = self.window_heads
        size = self.config.page_size
        number += room * 32
        for i, page in enumerate(pages):
            token = np.arange(i * size, (i + 1) * size)[:, None, None]
            head = np.array(heads)[None, :, None]
            element = np.arange(buffer.shape[-1])[None, None, :]
            values = (((number * 128 + layer) * 64 + head) * 65536 + token) * 64 + element
            buffer[page * size : (page + 1) * size] = values


class MetadataRows:
    """A rank's metadata as a tensor `[slots, bytes]` per buffer of the engine's `aux`."""

    def __init__(self, c: SimpleNamespace, aux):
        self.rows = [getattr(aux, name).view(torch.uint8) for name in METADATA_ROWS]
        self.has_hidden_states = c.role == "prefill" or c.sends_hidden_states
        if c.role == "decode":
            for row in self.rows:
                row.fill_(UNWRITTEN)

    def copies(self) -> list[torch.Tensor]:
        return [row.cpu().clone() for row in self.rows]

    def write(self, rows: list[torch.Tensor], room: int, slot: int) -> None:
        """Writes bytes that encode room, row and offset; first token and room are the room.

        Decode's hidden states stay as they are if prefill does not send them.
        """
        number = torch.tensor([room])
        for i, row in enumerate(rows):
            if i == HIDDEN_STATES and not self.has_hidden_states:
                continue
            values = ((torch.arange(row.shape[1]) + room * 7 + i * 31) % 251).to(torch.uint8)
            if i in (0, len(rows) - 1):
                kind = torch.int64 if i else torch.int32
                values[: kind.itemsize] = number.to(kind).view(torch.uint8)
            row[slot] = values.to(row.device)

    def unexpected(self, expected: list[torch.Tensor], open_slots: Collection[int]) -> list[str]:
        """Returns a description of each row that differs, except for slots of open rooms."""
        closed = [slot for slot in range(AUX_SLOTS) if slot not in open_slots]
        wrong = [
            (right != row.cpu()).any(1)[closed].nonzero() for right, row in zip(expected, self.rows)
        ]
        return [
            f"metadata row {i}: slots {[closed[at] for at in slots.flatten().tolist()]}"
            for i, slots in enumerate(wrong)
            if len(slots)
        ]
