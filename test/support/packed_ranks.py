"""Ranks of 0.5.9 whose pools are in this process, and transfer libraries that copy between them.

Two layers of GQA. A prefill rank's pools hold the model's bytes, a decode rank's zeros:

    model = random_model()
    prefill, decode = Rank(0, 1, model), Rank(1, 2)
"""

import ctypes
from collections import defaultdict
from types import SimpleNamespace

import torch
from sglang.srt.disaggregation.base import KVArgs
from sglang.srt.disaggregation.kv_layout import Buffer, RankLayout, heads_of_rank, page_slots
from sglang.srt.disaggregation.pd.pool_views import PoolViews

HEADS, HEAD_BYTES, LAYERS = 2, 8, 2
PAGE, PAGES = 4, 8  # tokens per page, pages per buffer
# A request's pages on prefill and decode, and pages per chunk.
SRC, DST, CHUNKS = [5, 1, 2, 7, 0, 3], [4, 5, 0, 2, 1, 7], (4, 2)
UNITS = [(0, 4), (4, 6)]


def random_model() -> list[torch.Tensor]:
    """Returns the rows of all heads of each buffer, uint8, `[slots, bytes]`."""
    random = torch.Generator().manual_seed(1)
    shape = (PAGES * PAGE, HEADS * HEAD_BYTES)
    buffers = range(2 * LAYERS)
    return [torch.randint(256, shape, dtype=torch.uint8, generator=random) for _ in buffers]


def slots_of(pages: list[int]) -> torch.Tensor:
    return torch.from_numpy(page_slots(pages, PAGE))


class Rank:
    """A rank's pools.

    Attributes:
        args: The rank's `KVArgs`.
        rows: The rows of each buffer, uint8, `[slots, bytes per row]`.
    """

    def __init__(
        self,
        rank: int,
        tp_size: int,
        model: list[torch.Tensor] | None = None,
        whole_rows: bool = True,
    ):
        """Makes the pools of TP rank `rank`.

        Args:
            model: What a prefill rank's pools hold; None for a decode rank.
            whole_rows: Whether the rank sends or interleaves whole rows (`SGLANG_PD_PACKED`).
        """
        self.heads = heads_of_rank(rank, tp_size, HEADS)
        row = self.heads.count * HEAD_BYTES
        kv = tuple(
            Buffer(component, False, layer, PAGE * row, self.heads, PAGES)
            for component in "kv"
            for layer in range(LAYERS)
        )
        zeros = torch.zeros(PAGES * PAGE, HEADS * HEAD_BYTES, dtype=torch.uint8)
        wholes = model or [zeros for _ in kv]
        self.rows = [self.own(rows).clone(memory_format=torch.contiguous_format) for rows in wholes]
        self.args = args = KVArgs()
        place = (rank, tp_size, 0, 1, PAGE, "float16", "DRAM", LAYERS)
        args.layout = RankLayout(*place, kv, whole_rows=whole_rows)
        args.views = PoolViews([rows.view(PAGES, -1) for rows in self.rows], [])
        args.kv_data_ptrs = [rows.data_ptr() for rows in self.rows]
        args.kv_data_lens = [rows.numel() for rows in self.rows]
        args.kv_item_lens = [PAGE * row for _ in kv]
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [], [], []
        args.state_data_ptrs, args.state_data_lens, args.state_type = [], [], "none"
        args.engine_rank, args.gpu_id, args.page_size = rank, 0, PAGE

    @property
    def name(self) -> str:
        """The name by which prefill knows this decode rank; Mooncake needs an address."""
        return f"10.0.0.1:400{self.args.engine_rank}"

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the columns of this rank's heads out of rows of all heads."""
        return rows[:, self.heads.start * HEAD_BYTES : self.heads.stop * HEAD_BYTES]

    def buffer_at(self, address: int) -> int:
        """Returns the number of the buffer that contains this address."""
        starts = enumerate(self.args.kv_data_ptrs)
        (found,) = (i for i, start in starts if 0 <= address - start < self.rows[i].numel())
        return found

    def expected_rows(self, model: list[torch.Tensor], src=SRC, dst=DST) -> list[torch.Tensor]:
        """Returns `rows` after a request whose pages are `src` on prefill and `dst` here."""
        expected = [torch.zeros_like(rows) for rows in self.rows]
        for rows, whole in zip(expected, model):
            rows[slots_of(dst)] = self.own(whole)[slots_of(src)]
        return expected

    def has_received(self, model: list[torch.Tensor], src=SRC, dst=DST) -> bool:
        """Whether a request has arrived, and no other page was written."""
        return all(map(torch.equal, self.rows, self.expected_rows(model, src, dst)))


class CopyingAgent:
    """Stands in for NIXL's agent: a write copies, and brings its notification, when it is done.

    Attributes:
        started: The writes that were started.
        arrived: Notifications by decode rank.
        start_of, state_of: Return what NIXL answers for a write: when it starts, and later.
        is_lost: Whether the connections to all decode ranks are lost, until one is added again.
    """

    def __init__(self):
        self.started: list[SimpleNamespace] = []
        self.arrived: dict[str, list[bytes]] = defaultdict(list)
        self.start_of, self.state_of = lambda write: "PROC", lambda write: "DONE"
        self.is_lost = False

    def rounds(self, peer: str) -> list[SimpleNamespace]:
        """Returns the writes of KV that were started to a decode rank."""
        return [write for write in list(self.started) if write.peer == peer and write.copies]

    def register_memory(self, regions, kind: str):
        return regions, kind

    def get_xfer_descs(self, rows, kind: str):
        return rows.tolist()

    def initialize_xfer(self, operation: str, src, dst, peer: str, notification: bytes):
        if self.is_lost:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        copies = [(to, start, size) for (start, size, _), (to, *_) in zip(src, dst)]
        return SimpleNamespace(peer=peer, copies=copies, notification=notification, state="PROC")

    def transfer(self, write) -> str:
        write.is_alone = all(one.state != "PROC" for one in self.rounds(write.peer))
        write.number = len(self.rounds(write.peer))
        self.started.append(write)
        return self.start_of(write)

    def check_xfer_state(self, write) -> str:
        write.state = self.state_of(write)
        if write.state == "DONE":
            for copy in write.copies:
                ctypes.memmove(*copy)
            if write.notification:
                self.send_notif(write.peer, write.notification)
        return write.state

    def release_xfer_handle(self, write) -> None:
        raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")

    def send_notif(self, peer: str, message: bytes) -> None:
        self.arrived[peer].append(message)

    def add_remote_agent(self, metadata: bytes) -> None:
        self.is_lost = False

    def remove_remote_agent(self, name: str) -> None:
        pass


class CopyingEngine:
    """Stands in for Mooncake's transfer engine.

    Attributes:
        written: Destinations of each call.
        status_of: Returns the status of the call of this number, from 1.
    """

    def __init__(self):
        self.written: list[list[int]] = []
        self.status_of = lambda number: 0

    def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
        return 0

    def batch_transfer_sync(self, session: str, src, dst, lengths) -> int:
        if not dst:  # metadata, of which these ranks have none
            return 0
        self.written.append(dst)
        status = self.status_of(len(self.written))
        for copy in zip(dst, src, lengths) if status == 0 else ():
            ctypes.memmove(*copy)
        return status
