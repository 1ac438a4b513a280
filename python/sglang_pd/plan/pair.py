"""Two servers of one model, and what each of their ranks holds, in the core's types."""

from dataclasses import dataclass, replace
from functools import cached_property

from sglang_pd.patchset.patches import version_key
from sglang_pd.plan.core import kv_layout
from sglang_pd.plan.hybrids import FULL, RECURRENT, WINDOW
from sglang_pd.plan.model import INDEX_BLOCK, KVHeads, Model
from sglang_pd.plan.sizes import ServerSizes

BACKENDS = ("nixl", "mooncake", "ascend")
NPU_PAGE, INDEXED_PAGE = 128, 64

# Name, total KV heads (None: opaque), and bytes per token, of one head or (opaque) of all.
Component = tuple[str, int | None, int]


@dataclass(frozen=True)
class ServerPair:
    """A prefill and a decode server with one backend and one engine release.

    `fia` selects the NPU's other pool layout, `ASCEND_USE_FIA`.
    """

    model: Model
    prefill: ServerSizes
    decode: ServerSizes
    backend: str = "nixl"
    release: str = "0.5.23"
    fia: bool = False

    @property
    def sends_state_by_plan(self) -> bool:
        """Whether a transfer plan covers recurrent state; later releases send it their own way."""
        return version_key(self.release) < version_key("0.5.18")

    @property
    def sends_kv_by_plan(self) -> bool:
        """Whether a transfer plan covers the KV; later releases send that of hybrids their way."""
        return self.model.recurrent is None or self.sends_state_by_plan

    @property
    def names_chunks(self) -> bool:
        """Whether chunks to interleave are named in a message, and not with prefill's status."""
        return self.sends_kv_by_plan and not self.sends_state_by_plan

    @property
    def tp(self) -> tuple[int, int]:
        """Attention TP size of prefill and of decode."""
        return self.prefill.attention_tp, self.decode.attention_tp

    @property
    def pp(self) -> tuple[int, int]:
        """Number of stages of prefill and of decode."""
        return self.prefill.pp, self.decode.pp

    @property
    def tp_differs(self) -> bool:
        return self.tp[0] != self.tp[1]

    @property
    def pp_differs(self) -> bool:
        return self.pp[0] != self.pp[1]

    @property
    def sides(self) -> dict[str, ServerSizes]:
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def pages(self) -> str:
        """The page size, or both if they differ, for display."""
        return " and ".join(dict.fromkeys(str(side.page) for side in self.sides.values()))

    @cached_property
    def stages(self) -> tuple[list[range], list[range]]:
        """Prefill's and decode's layers per stage. Raises ValueError as `ServerSizes.stages`."""
        return tuple(side.stages(self.model.layers) for side in self.sides.values())

    def stages_of(self, side: str) -> list[range]:
        return self.stages[side == "decode"]

    @property
    def splits_recurrent_state(self) -> bool:
        """Whether recurrent state is sent between different TP or PP sizes."""
        return self.model.recurrent is not None and (self.tp_differs or self.pp_differs)

    def layout(self, side: str, tp: int, stage: int) -> "kv_layout.RankLayout":
        """Returns what the rank with this attention TP rank and stage holds.

        Raises LayoutError if the KV heads cannot be divided among the ranks.
        """
        sizes = self.sides[side]
        layers = self.stages_of(side)[stage]
        drafts = range(sizes.draft if stage == sizes.pp - 1 else 0)
        rank = (tp, sizes.attention_tp)
        models = ((False, self.model.layers_of_kind(FULL, layers)), (True, drafts))
        kv = [(is_draft, one, held) for is_draft, held in models for one in self._attention()]
        state = [(False, one, self.model.layers_of_kind(WINDOW, layers)) for one in self._window()]
        state += [(is_draft, one, held) for is_draft, held in models for one in self._index_state()]
        buffers = self._buffers(state, sizes, rank)
        if self.model.recurrent and (self.sends_state_by_plan or not self.splits_recurrent_state):
            buffers += self._recurrent(self.model.layers_of_kind(RECURRENT, layers), sizes)
        return kv_layout.RankLayout(
            tp_rank=tp,
            tp_size=sizes.attention_tp,
            pp_rank=stage,
            pp_size=sizes.pp,
            page_size=sizes.page,
            dtype=self.model.dtype,
            memory="VRAM",
            total_layers=self.model.layers,
            kv=self._buffers(kv, sizes, rank),
            state=buffers,
        )

    def heads_of_rank(self, tp: int, size: int) -> range:
        """Returns a TP rank's KV heads; empty with MLA, or if they cannot be divided so."""
        total = self.model.kv_heads
        try:
            heads = kv_layout.heads_of_rank(tp, size, total) if total else None
        except kv_layout.LayoutError:
            heads = None
        return range(0) if heads is None else range(heads.start, heads.stop)

    def slot_bytes(self, side: str, stage: int) -> int:
        """Returns the bytes of a request's recurrent state on a rank of this stage."""
        if self.model.recurrent is None:
            return 0
        layers = self.model.layers_of_kind(RECURRENT, self.stages_of(side)[stage])
        return sum(self.model.recurrent.slot(self.sides[side].attention_tp)) * len(layers)

    def _buffers(self, parts: list, sizes: ServerSizes, rank: tuple[int, int]) -> tuple:
        """Returns a buffer for each layer of each (is draft, component, layers)."""
        buffers = []
        for is_draft, (name, total, size), layers in parts:
            heads = None if total is None else kv_layout.heads_of_rank(*rank, total)
            page = sizes.page * size * (1 if heads is None else heads.count)
            buffers += [kv_layout.Buffer(name, is_draft, n, page, heads) for n in layers]
        return tuple(buffers)

    def _attention(self) -> list[Component]:
        """Returns what a layer with full attention sends as KV."""
        held, each = self.model.attention, self.model.itemsize
        if isinstance(held, KVHeads):
            return _head_components("", held, each)
        if self.backend != "ascend":
            return [("kv", None, (held.latent + held.rope) * each)]
        sizes = {"k": held.latent, "v": held.rope, "index_k": held.index}
        return [(name, None, size * each) for name, size in sizes.items() if size]

    def _index_state(self) -> list[Component]:
        """Returns the index keys if they are state: one byte per element, and scales."""
        if not self.model.has_index or self.backend == "ascend":
            return []
        index = self.model.attention.index
        return [("index_k", None, index + index // INDEX_BLOCK * 4)]

    def _window(self) -> list[Component]:
        held = self.model.window_heads
        return [] if held is None else _head_components("swa_", held, self.model.itemsize)

    def _recurrent(self, layers: list[int], sizes: ServerSizes) -> tuple:
        slots = self.model.recurrent.slot(sizes.attention_tp)
        return tuple(
            kv_layout.Buffer(f"mamba_{i}", False, layer, size)
            for i, size in enumerate(slots)
            for layer in layers
        )


def make_pair(
    model: Model, prefill: ServerSizes, decode: ServerSizes, backend: str, release: str, fia: bool
) -> ServerPair:
    """Returns a pair; a page size of 0 becomes the engine's default.

    Raises ValueError if the stages do not fit the model, or no pool has the layout of `fia`.
    """
    if fia and (backend != "ascend" or model.is_mla):
        raise ValueError("--fia is a layout of GQA pools on NPUs: use it with --backend ascend")
    usual = NPU_PAGE if backend == "ascend" else INDEXED_PAGE if model.has_index else 1
    sides = [replace(side, page=side.page or usual) for side in (prefill, decode)]
    pair = ServerPair(model, *sides, backend, release, fia)
    _ = pair.stages
    return pair


def _head_components(prefix: str, held: KVHeads, itemsize: int) -> list[Component]:
    widths = {"k": held.k, "v": held.v}
    return [(prefix + name, held.total, width * itemsize) for name, width in widths.items()]
