"""KV heads between TP sizes over NIXL: packed and sliced, beside one write of as many bytes.

Run by `scripts/bench.sh wire`. A prefill rank and a decode rank are two processes of this machine,
with NIXL's agents and pools in host memory, or with `--device cuda` on one GPU, without an engine's
server. Prefill writes 256 MiB of one chunk as the patch set plans it, and packs by the patch set's
code. UCX chooses how: within a host by shared memory, within a GPU by the driver's copies, or over
TCP with `UCX_TLS`.

    flat         the same number of bytes, contiguous on both sides
    whole pages  as between ranks of equal TP, to the same slots
    sliced       half of each row, token by token
    packed       whole rows: TP 2 to 1 without decode's interleaving, TP 1 to 2 with packing

What a core or the GPU interleaves or packs in a second is measured apart, beside one memcpy.
"""

import contextlib
import enum
import functools
import itertools
import multiprocessing
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import numpy as np
import torch
import typer
from bench_common import WIRE, JsonFile, console, finish, medians, show
from bench_packed import (
    CHUNK,
    DIRECTIONS,
    HEAD_BYTES,
    HEADS,
    WORKER_BYTES,
    gqa_layout,
    kv_plan,
    make_pages,
    wire_misses,
)
from sglang.srt.disaggregation import kv_layout
from sglang.srt.disaggregation.pd.interleaving import interleave
from sglang.srt.disaggregation.pd.packing import PackingBuffers, copies_of_unit, pack
from sglang.srt.disaggregation.pd.pool_views import PoolViews
from sglang.srt.disaggregation.pd.side_stream import side_stream

LAYERS = 16
BUFFERS = 2 * LAYERS
SENT_BYTES = BUFFERS * CHUNK * HEADS // 2 * HEAD_BYTES
POOL_TOKENS = 2 * CHUNK  # scattered pages have gaps
PAGE_SIZES = (1, 16, 64, 128)
# By device: values of UCX_TLS.
TRANSPORTS = {
    "cpu": {"shared memory": None, "TCP": "tcp"},
    "cuda": {"one GPU": None, "GPU over TCP": "tcp,cuda_copy"},
}
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}  # NIXL's segment kinds
THREADS = 8  # of prefill's agent, as in the engine
POLL_SECONDS = 0.0002
REPEATS = 5


Device = enum.StrEnum("Device", {name: name for name in TRANSPORTS})


class End:
    """One rank: a pool, and an agent that has registered it. It lives in a process of its own."""

    def __init__(self, device: str, tp_size: int, threads: int = 0):
        from nixl._api import nixl_agent, nixl_agent_config

        self.tp, self.memory = (0, tp_size), MEMORY[device]
        row = HEADS // tp_size * HEAD_BYTES
        self.pool = torch.zeros(BUFFERS, POOL_TOKENS, row, dtype=torch.uint8, device=device)
        config = nixl_agent_config(backends=["UCX"], num_threads=threads)
        self.agent = nixl_agent(str(uuid.uuid4()), config)
        self.register(self.pool)

    def register(self, memory: torch.Tensor) -> None:
        self.agent.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], self.memory)

    @property
    def pointers(self) -> list[int]:
        return [buffer.data_ptr() for buffer in self.pool]

    def layout(self, page_size: int):
        return gqa_layout(kv_layout, self.tp, page_size, LAYERS)

    def memcpy(self) -> None:
        """Copies as many bytes as a chunk has."""
        with side_stream(self.pool.device):
            self.copied.copy_(self.pool.view(-1)[:SENT_BYTES])

    @functools.cached_property
    def copied(self) -> torch.Tensor:
        return torch.zeros(SENT_BYTES, dtype=torch.uint8, device=self.pool.device)


class DecodeEnd(End):
    def about(self) -> tuple[bytes, list[int]]:
        """What prefill needs to know of this rank: its agent's metadata, and its addresses."""
        return self.agent.get_agent_metadata(), self.pointers

    def clear(self) -> None:
        self.pool.zero_()

    def interleave(self, page_size: int, pages: np.ndarray) -> None:
        """Interleaves a chunk in all buffers, as after the last part has arrived."""
        layout = self.layout(page_size)
        slots = torch.from_numpy(kv_layout.page_slots(pages, page_size)).to(self.pool.device)
        with side_stream(self.pool.device):
            for one in kv_layout.make_permutations(layout, layout.kv, self.pointers, 2):
                for number in one.buffers:
                    interleave(self.pool[number], slots, one)

    def checksum(self, page_size: int, pages: np.ndarray) -> int:
        """A checksum of prefill's half of the chunk's rows, in the chunk's order."""
        slots = torch.from_numpy(kv_layout.page_slots(pages, page_size))
        width = HEADS // 2 * HEAD_BYTES
        return zlib.crc32(self.pool.cpu()[:, slots, :width].contiguous().numpy())


class PrefillEnd(End):
    def __init__(self, device: str, tp_size: int):
        super().__init__(device, tp_size, THREADS)
        self.pool.view(torch.int64).random_()
        self.packing = PackingBuffers(PoolViews([self.pool], []), 1, WORKER_BYTES, 1)
        self.register(self.packing.memory)

    def connect(self, metadata: bytes, pointers: list[int], decode_tp: int) -> None:
        self.peer = self.agent.add_remote_agent(metadata)
        self.their_pointers, self.their_tp = pointers, (0, decode_tp)

    def send_whole(self, page_size: int, src: np.ndarray, dst: np.ndarray) -> int:
        """Returns the number of copies."""
        equal = gqa_layout(kv_layout, (0, max(self.tp[1], self.their_tp[1])), page_size, LAYERS)
        plan = kv_plan(kv_layout, equal, equal, (self.pointers, self.their_pointers))
        return self._write_all([plan.copies(src, dst)])

    def plan(self, page_size: int, is_packed: bool):
        peer = gqa_layout(kv_layout, self.their_tp, page_size, LAYERS)
        pointers = (self.pointers, self.their_pointers)
        return kv_plan(kv_layout, self.layout(page_size), peer, pointers, is_packed)

    def send_flat(self) -> None:
        src, dst = self.pointers[0], self.their_pointers[0]
        self._write(*(np.array([[at, SENT_BYTES, 0]]) for at in (src, dst)))

    def send_sliced(self, page_size: int, src: np.ndarray, dst: np.ndarray) -> int:
        """Returns the number of copies."""
        return self._write_all([self.plan(page_size, is_packed=False).copies(src, dst)])

    def send_packed(self, page_size: int, src: np.ndarray, dst: np.ndarray) -> int:
        """Returns the number of copies."""
        plan = self.plan(page_size, is_packed=True)
        self._view_pages(page_size)
        unit = copies_of_unit(self.packing, "kv", plan, src, dst)
        return self._write_all(copies for copies, _ in unit)

    def pack(self, page_size: int, src: np.ndarray, dst: np.ndarray) -> None:
        """Packs a chunk, and sends nothing."""
        self._view_pages(page_size)
        half = self.packing.memory[: WORKER_BYTES // 2]
        with side_stream(self.pool.device):
            for one in self.plan(page_size, is_packed=True).rounds(src, dst, len(half)):
                pack(one, self.packing.views.kv, page_size, half)

    def _view_pages(self, page_size: int) -> None:
        pages = [buffer.view(POOL_TOKENS // page_size, -1) for buffer in self.pool]
        self.packing.views, self.packing.page_size = PoolViews(pages, []), page_size

    def _write_all(self, batches: Iterable) -> int:
        count = 0
        for copies in batches:
            if len(copies):
                self._write(*copies.descriptors(0, 0))
                count += len(copies)
        return count

    def _write(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Writes and waits.

        Raises:
            RuntimeError: NIXL reports an error.
        """
        sides = (self.agent.get_xfer_descs(one, self.memory) for one in (src, dst))
        handle = self.agent.initialize_xfer("WRITE", *sides, self.peer)
        state = self.agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_SECONDS)
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state}")


class RemoteEnd:
    """An end in its own process; its methods are called there."""

    def __init__(self, kind: type, *arguments):
        context = multiprocessing.get_context("spawn")  # UCX reads its variables in each process
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, kind, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, name: str, *arguments):
        """Returns what the end's method returns. Raises EOFError if its process has exited."""
        self.connection.send((name, arguments))
        return self.connection.recv()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def serve(connection, kind: type, arguments: tuple) -> None:
    """Runs an end's methods for the other side of the connection."""
    end = kind(*arguments)
    while True:
        name, given = connection.recv()
        connection.send(getattr(end, name)(*given))


@contextlib.contextmanager
def connected(
    device: str, direction: str, tls: str | None
) -> Iterator[tuple[RemoteEnd, RemoteEnd]]:
    """Yields a prefill end and a decode end that are connected over this transport."""
    os.environ.pop("UCX_TLS", None)
    if tls is not None:
        os.environ["UCX_TLS"] = tls
    prefill_tp, decode_tp = DIRECTIONS[direction]
    with contextlib.ExitStack() as stack:
        sizes = ((PrefillEnd, prefill_tp), (DecodeEnd, decode_tp))
        ends = tuple(RemoteEnd(kind, device, size) for kind, size in sizes)
        for end in ends:
            stack.callback(end.stop)
        prefill, decode = ends
        prefill.call("connect", *decode.call("about"), decode_tp)
        yield prefill, decode


def chunk_pages(page_size: int, is_scattered: bool) -> tuple[np.ndarray, np.ndarray]:
    """The chunk's pages on prefill and on decode."""
    src, dst = (make_pages(CHUNK // page_size, is_scattered, seed) for seed in (1, 2))
    return src, dst


def check(prefill: RemoteEnd, decode: RemoteEnd, page_size: int, src, dst) -> dict[str, int]:
    """Checks that packed and sliced heads arrive alike; returns the number of copies of each.

    Raises:
        RuntimeError: They do not.
    """
    counts, sums = {}, {}
    for name in ("sliced", "packed"):
        decode.call("clear")
        counts[name] = prefill.call(f"send_{name}", page_size, src, dst)
        if name == "packed":
            decode.call("interleave", page_size, dst)  # nothing to do from TP 1 to 2
        sums[name] = decode.call("checksum", page_size, dst)
    if sums["sliced"] != sums["packed"]:
        raise RuntimeError(f"packed heads differ from sliced ones, pages of {page_size}")
    return counts


def measure(
    ends: tuple[RemoteEnd, RemoteEnd], direction: str, page_size: int, is_scattered: bool
) -> dict:
    """One row: milliseconds of each way in turns, and GB/s of the copy and of memcpy."""
    prefill, decode = ends
    src, dst = chunk_pages(page_size, is_scattered)
    copies = check(prefill, decode, page_size, src, dst)

    def remote(end: RemoteEnd, name: str, *given) -> Callable[[], object]:
        return lambda: end.call(name, *given)

    wire = {
        "flat": remote(prefill, "send_flat"),
        "whole": remote(prefill, "send_whole", page_size, src, dst),
        "sliced": remote(prefill, "send_sliced", page_size, src, dst),
        "packed": remote(prefill, "send_packed", page_size, src, dst),
    }
    interleaves = DIRECTIONS[direction][0] > DIRECTIONS[direction][1]
    if interleaves:
        copy, copier, copied = remote(decode, "interleave", page_size, dst), decode, 2 * SENT_BYTES
    else:
        copy, copier, copied = remote(prefill, "pack", page_size, src, dst), prefill, SENT_BYTES
    core = {"copy": copy, "memcpy": remote(copier, "memcpy")}
    for sides in (wire, core):
        medians(sides, 1)  # warms up
    seconds = {**medians(wire, REPEATS), **medians(core, REPEATS)}
    return {
        "direction": direction,
        "page_size": page_size,
        "lie": "scattered" if is_scattered else "in a row",
        "copies": copies,
        "ms": {name: 1e3 * seconds[name] for name in wire},
        "of_flat": {name: seconds["flat"] / seconds[name] for name in ("packed", "sliced")},
        "of_whole": seconds["whole"] / seconds["packed"],
        "copy ms": 1e3 * seconds["copy"],
        "copy GB/s": copied / seconds["copy"] / 1e9,
        "memcpy GB/s": SENT_BYTES / seconds["memcpy"] / 1e9,
    }


def main(
    json_file: JsonFile = None,
    only: Annotated[
        str, typer.Option("--only", metavar="WORD", help="Only transports with WORD in their name.")
    ] = "",
    device: Annotated[Device, typer.Option(help="Where the pools are.")] = Device.cpu,
) -> None:
    """Time all ways to send a chunk; status 1 if packed heads miss a goal."""
    rows = []
    for (transport, tls), direction in itertools.product(TRANSPORTS[device].items(), DIRECTIONS):
        if only not in transport:
            continue
        with connected(device, direction, tls) as ends:
            for page_size, is_scattered in itertools.product(PAGE_SIZES, (False, True)):
                row = measure(ends, direction, page_size, is_scattered)
                rows.append({"transport": transport, **row})
        console().print(f"{transport}, {direction}: measured", highlight=False)
    show(f"{SENT_BYTES >> 20} MiB over NIXL, medians, in turns", WIRE, rows)
    finish({"rows": rows, "missed": wire_misses(rows)}, json_file)


if __name__ == "__main__":
    typer.run(main)
