"""KV managers of later releases without an engine; fake transfer libraries record their calls.

    prefill, decode = prefill_rank("nixl"), decode_rank("nixl")
    process_messages(prefill, registration_message(decode), metadata_message(decode, room=7))

`process_messages` runs the engine's reader thread, in the calling thread, over the messages.
"""

import contextlib
import ctypes
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import numpy as np
import sglang.srt.disaggregation.common.conn as common
import sglang.srt.disaggregation.mooncake.conn as mooncake
import sglang.srt.disaggregation.nixl.conn as nixl
import torch
from engine_release import IS_0_5_18
from null_transfer import NullAgent
from rank_faults import nixl_agent
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.common.utils import FastQueue
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.kv_layout import (
    Buffer,
    Heads,
    RankLayout,
    heads_of_rank,
    is_extension_frame,
)
from sglang.srt.disaggregation.pd.pool_views import PoolViews
from sglang.srt.disaggregation.pd.unit_exchange import UNITS
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel

if IS_0_5_18:
    import fakes_0_5_18

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
BACKENDS = ("mooncake", "nixl")
PATCHED = {"mooncake": mooncake.MooncakeKVManager, "nixl": nixl.NixlKVManager}
SENDERS = {"mooncake": mooncake.MooncakeKVSender, "nixl": nixl.NixlKVSender}
RECEIVERS = {"mooncake": mooncake.MooncakeKVReceiver, "nixl": nixl.NixlKVReceiver}
ENGINES = {"mooncake": mooncake.EngineMooncakeKVManager, "nixl": nixl.EngineNixlKVManager}

PAGE, PAGES, PAGE_BYTES = 64, 100, 64 * 1152
ROWS, SLOTS = (64,) * 10, 16
BASE = {PREFILL: 1 << 32, DECODE: 1 << 40}
PEER = {"mooncake": "127.0.0.1:7000", "nixl": "peer"}
ENDPOINT = ("127.0.0.1", 5555)
ADDRESS = "127.0.0.1:8998"  # of prefill's bootstrap server
NOTICE = ("7_kv_0_1_0",) if IS_0_5_18 else ()  # for decode, which 0.5.18's NIXL sends with KV
BUFFER, STATE = 1 << 26, 1 << 36  # address distance of two buffers, and of KV and state
# Of `gqa_layout`: KV heads, tokens per page, pages per buffer, and bytes of a head.
GQA_HEADS, GQA_PAGE, GQA_PAGES = 4, 4, 16
GQA_BYTES = {"k": 16, "v": 8, "swa_k": 8, "swa_v": 8}


@contextlib.contextmanager
def published_config():
    """Provides, within the block, the configuration that a server would publish."""
    disagg = SimpleNamespace(disaggregation_decode_allocation_policy="early")
    plain = SimpleNamespace(enable_trace=False, enable_unified_memory=False)
    with contextlib.ExitStack() as stack:
        for module, name, values in (
            (common, "get_disagg", disagg),
            (common, "get_observability", plain),
            (mooncake, "get_memory", plain),
            (mooncake, "get_spec", SimpleNamespace(speculative_algorithm=None)),
        ):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, lambda values=values: values))
        if IS_0_5_18:
            stack.enter_context(fakes_0_5_18.parallel_config())
        else:
            widths = {"num_dp_ranks": 1, "enable_dsa_cache_layer_split": False}
            widths["enable_kv_cache_sharding"] = False
            stack.enter_context(get_parallel().override(**widths))
        yield


def mla_layout(
    index_keys: tuple[int, ...] = (), layers: int = 4, memory: str = "VRAM"
) -> RankLayout:
    """Returns a layout of MLA on one rank.

    Args:
        index_keys: Bytes per page of each layer's index keys, 0 for an elided layer.
    """
    kv = tuple(Buffer("kv", False, n, PAGE_BYTES, None, PAGES) for n in range(layers))
    state = tuple(
        Buffer("index_k", False, n, size, None, PAGES if size else 0)
        for n, size in enumerate(index_keys)
    )
    return RankLayout(0, 1, 0, 1, PAGE, "bfloat16", memory, layers, kv, state, ROWS, SLOTS)


def mha_layout(held: Heads, tp: tuple[int, int], window_bytes: int = 0) -> RankLayout:
    """Returns a layout of two MHA layers, and with `window_bytes` of two more with windows.

    Args:
        held: This rank's KV heads.
        tp: TP rank and TP size.
        window_bytes: Bytes per head and token of a layer with a window.
    """
    layers = (0, 1)
    page = PAGE * held.count
    kv = tuple(Buffer(c, False, n, page * 256, held, PAGES) for c in "kv" for n in layers)
    state = tuple(
        Buffer(f"swa_{c}", False, n + 2, page * window_bytes, held, PAGES)
        for c in ("kv" if window_bytes else "")
        for n in layers
    )
    return RankLayout(*tp, 0, 1, PAGE, "bfloat16", "VRAM", 4, kv, state, ROWS, SLOTS)


def gqa_layout(
    tp: tuple[int, int], whole_rows: bool = True, has_windows: bool = False
) -> RankLayout:
    """Returns a layout of two GQA layers, whose pages are small, and maybe two more with windows.

    Args:
        tp: TP rank and TP size.
    """
    held = heads_of_rank(*tp, GQA_HEADS)

    def buffers(components: tuple[str, ...], layers: tuple[int, ...]) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(one, False, n, GQA_PAGE * held.count * GQA_BYTES[one], held, GQA_PAGES)
            for one in components
            for n in layers
        )

    kv, windows = buffers(("k", "v"), (0, 1)), buffers(("swa_k", "swa_v"), (2, 3))
    sides = (kv, windows if has_windows else (), ROWS, SLOTS)
    return RankLayout(*tp, 0, 1, GQA_PAGE, "bfloat16", "VRAM", 4, *sides, whole_rows=whole_rows)


def kv_args(layout: RankLayout, base: int) -> SimpleNamespace:
    """Returns the engine's `KVArgs` of these buffers; only metadata rows are real memory.

    `base` is the address of the first KV buffer.
    """

    def addresses(buffers, start: int) -> list[int]:
        return [start + n * BUFFER if one.page_bytes else 0 for n, one in enumerate(buffers)]

    held = layout.kv[0].heads
    rows = [np.zeros((SLOTS, width), np.uint8) for width in ROWS]
    kind = StateType.DSA if held is None else StateType.SWA
    state = [layout.state] if layout.state else []
    return SimpleNamespace(
        layout=layout,
        views=None,
        packing=None,
        verifier=None,
        kv_data_ptrs=addresses(layout.kv, base),
        kv_item_lens=[one.page_bytes for one in layout.kv],
        kv_data_lens=[one.page_bytes * one.pages for one in layout.kv],
        kv_data_mem_kinds=["VRAM"] * len(layout.kv),
        kv_layer_ids=[],
        aux_rows=rows,
        aux_data_ptrs=[row.ctypes.data for row in rows],
        aux_item_lens=list(ROWS),
        aux_data_lens=[row.nbytes for row in rows],
        state_types=[kind] * len(state),
        state_data_ptrs=[addresses(one, base + STATE) for one in state],
        state_item_lens=[[one.page_bytes for one in part] for part in state],
        state_data_lens=[[one.page_bytes * one.pages for one in part] for part in state],
        state_layer_ids=[[] for _ in state],
        state_dim_per_tensor=[],
        num_draft_entries=0,
        kv_head_num=held.count if held else 1,
        total_kv_head_num=held.total if held else 1,
        mla_compression_ratios=None,
        page_size=layout.page_size,
        gpu_id=0,
        engine_rank=layout.tp_rank,
        prefill_start_layer=0,
        prefill_end_layer=layout.total_layers,
    )


def give_memory(manager, seed: int = 0) -> None:
    """Puts a rank's KV and state into real memory of random bytes, and views it."""
    args, random = manager.kv_args, np.random.default_rng(seed)

    def memory(buffers: tuple[Buffer, ...]) -> list[torch.Tensor]:
        shapes = [(one.pages, one.page_bytes) for one in buffers]
        return [torch.from_numpy(random.integers(0, 256, shape, np.uint8)) for shape in shapes]

    args.views = PoolViews(memory(args.layout.kv), memory(args.layout.state))
    args.kv_data_ptrs = [pages.data_ptr() for pages in args.views.kv]
    if args.layout.state:
        args.state_data_ptrs = [[pages.data_ptr() for pages in args.views.state]]


def move_bytes(prefill) -> None:
    """Lets a rank's transfers copy real memory; NIXL's only once a state is asked for."""

    def copy(copies) -> None:
        for src, dst, length in copies:
            ctypes.memmove(dst, src, length)

    def write(session: str, *lists) -> int:
        copy(zip(*lists))
        return 0

    def check(handle) -> str:
        while posted:
            copy(posted.pop(0))
        return "DONE"

    posted: list = []
    if backend_of(prefill) == "mooncake":
        prefill.engine.batch_transfer_sync = write
    else:
        agent = nixl_agent(prefill)
        agent.transfer = lambda handle: (posted.append(handle), "PROC")[1]
        agent.check_xfer_state = check


class FakeNixlAgent(NullAgent):
    """Records transfers; it can lose its peers, and fail to find their memory again."""

    def __init__(self, name: str):
        super().__init__(name)
        self.is_failing = False
        self.memory_of_peer = ("VRAM", "DRAM")
        self.transfers: list = []
        self.notifications: list[bytes] = []

    def send_notif(self, peer: str, notification: bytes) -> None:
        self.notifications.append(notification)

    def remove_remote_agent(self, name: str) -> None:
        self.peers.remove(name)

    def prep_xfer_dlist(self, peer: str, runs, memory: str):
        if peer and (self.is_failing or memory not in self.memory_of_peer):
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        return runs, memory

    def make_prepped_xfer(self, _, ours, src, theirs, dst, notification=b""):
        sides = (self._chosen(ours, src), self._chosen(theirs, dst))
        return self.initialize_xfer("", *sides, "", notification)

    def initialize_xfer(self, _, ours, theirs, peer: str, notification=b""):
        self.notifications += [notification] if notification else []
        (src, _), (dst, _) = ours, theirs
        assert src[:, 1].tolist() == dst[:, 1].tolist()
        return list(zip(src[:, 0].tolist(), dst[:, 0].tolist(), src[:, 1].tolist()))

    def transfer(self, handle) -> str:
        self.transfers += handle
        return "PROC"

    @staticmethod
    def _chosen(listed, numbers):
        runs, memory = listed
        blocks = []
        for address, length, device, *run in runs.tolist():
            stride, count = run or (0, 1)  # 0.5.18's engine lists block by block
            blocks += [(address + n * stride, length, device) for n in range(count)]
        return np.array([blocks[n] for n in numbers], dtype=np.uint64).reshape(-1, 3), memory


class FakeMooncakeEngine:
    """Stands in for Mooncake's transfer engine."""

    def __init__(self, session: str):
        self.session = session
        self.transfers: list = []

    def get_session_id(self) -> str:
        return self.session

    def batch_transfer_sync(self, session: str, src, dst, lengths) -> int:
        self.transfers += zip(src, dst, lengths)
        return 0


def make_manager(backend: str, layout: RankLayout, role=PREFILL, kinds=None, **more):
    """Makes a rank's KV manager.

    Args:
        kinds: Manager classes by backend; the patch set's by default.
        more: Further attributes of the manager; `base` is the address of its KV buffers.
    """
    kind = (kinds or PATCHED)[backend]
    manager = kind.__new__(kind)
    args = kv_args(layout, more.pop("base", BASE[role]))
    made = {
        **_common_attributes(args, role),
        **_role_attributes(role),
        **_BACKEND_ATTRIBUTES[backend](),
        **more,
    }
    for name, value in made.items():
        setattr(manager, name, value)
    if IS_0_5_18:
        fakes_0_5_18.complete(manager, backend)
    manager.notified = []
    manager.watch_peer = manager.note_peer_alive = lambda *peer: None  # no sockets
    manager.is_silent = lambda rank: False
    manager.connect_early = lambda *peer: None  # no thread
    manager._send_multipart_locked = lambda endpoint, frames, is_ipv6=False: (
        manager.notified.append((endpoint, frames))
    )
    return manager


def prefill_rank(backend: str, layout: RankLayout | None = None, **more):
    """Makes a prefill rank's KV manager, by default for MLA; `more` as in `make_manager`."""
    return make_manager(backend, layout or mla_layout(), PREFILL, **more)


def decode_rank(backend: str, layout: RankLayout | None = None, number: int = 0, **more):
    """Makes a decode rank's KV manager, by default for MLA; `more` as in `make_manager`.

    Args:
        number: Another decode rank has another number, and so another name and port.
    """
    decode = make_manager(backend, layout or mla_layout(), DECODE, **more)
    decode.rank_port += number
    if number and backend == "nixl":
        nixl_agent(decode).name += str(number)
    elif number:
        decode.engine.session = f"127.0.0.1:{7000 + number}"
    return decode


def _common_attributes(args: SimpleNamespace, role) -> dict:
    layout = args.layout
    return {
        "kv_args": args,
        "disaggregation_mode": role,
        "server_args": SimpleNamespace(enable_pd_role_switch=False),
        "is_mla_backend": layout.kv[0].heads is None,
        "is_hybrid_mla_backend": False,
        "kv_cache_dtype_str": layout.dtype,
        "attn_tp_rank": layout.tp_rank,
        "attn_tp_size": layout.tp_size,
        "state_tp_size": layout.tp_size,
        "pp_rank": layout.pp_rank,
        "pp_size": layout.pp_size,
        **{"attn_cp_rank": 0, "attn_cp_size": 1, "dcp_rank": 0, "dcp_size": 1},
        "enable_all_cp_ranks_for_transfer": False,
        "is_dummy_cp_rank": False,
        "local_ip": ENDPOINT[0],
        "rank_port": ENDPOINT[1],
        "bootstrap_port": 8998,
        "request_status": {},
        "failure_records": {},
        "failure_lock": threading.Lock(),
        "enable_deferred_decode_kv_release": True,
        "_deferred_ack_targets": {},
        "_deferred_ack_poisoned_rooms": set(),
        "enable_staging": False,
        "enable_trace": False,
        "_staging_handler": None,
        "_staging_outstanding": defaultdict(int),
    }


def _role_attributes(role) -> dict:
    if role == PREFILL:
        return {
            "transfer_infos": {},
            "decode_kv_args_table": {},
            "req_to_decode_prefix_len": {},
            "transfer_queues": [FastQueue()],
            "bootstrap_timeout": 100,
            "_dcp_pack_buffers": [],  # counts as made already
            "_kv_replica_factor": 1,
        }
    return {
        "connection_pool": {},
        "connection_lock": threading.Lock(),
        "session_pool": {},
        "session_pool_lock": threading.Lock(),
        "prefill_info_table": {},
        "prefill_response_tracker": {},
        "required_prefill_response_num_table": {},
        "addr_to_rooms_tracker": defaultdict(set),
        "_deferred_abort_ack_tracker": {},
        "_deferred_abort_generation": 0,
        "waiting_timeout": 100,
    }


def _nixl_attributes() -> dict:
    return {
        "agent": FakeNixlAgent(PEER["nixl"]),
        "src_mem_kind": "VRAM",
        "prep_handles": {},
        "prep_handle_slice_src": None,
        "prep_handles_slice_dst": {},
        "prep_handles_segment_src": {},
        "_num_slots_src": PAGES,
        "_prepared_state_plans": {},
        "_prepared_state_components": frozenset(),
        "_state_layout_rejections": {},
        "_peer_reload_lock": threading.Lock(),
        "_peer_reload_times": {},
    }


def _mooncake_attributes() -> dict:
    return {
        "engine": FakeMooncakeEngine(PEER["mooncake"]),
        "session_lock": threading.Lock(),
        "session_failures": defaultdict(int),
        "failed_sessions": set(),
        "failed_session_probes": {},
        "state_layout_rejections": {},
        "state_strides_validated": set(),
        "max_transfer_batch_indices": 0,
        "enable_custom_mem_pool": False,
        "custom_mem_pool_type": None,
        "_stopped": False,
        "_worker_threads": [],
    }


_BACKEND_ATTRIBUTES = {"mooncake": _mooncake_attributes, "nixl": _nixl_attributes}


# Messages


def registration_message(decode, is_described: bool = True) -> list[bytes]:
    """Returns this decode rank's registration; a stock rank's if not `is_described`."""
    if IS_0_5_18:
        kind = RECEIVERS[backend_of(decode)]
        return fakes_0_5_18.registration_message(decode, kind, is_described)
    message = decode.build_receiver_registration_message()
    return [frame for frame in message if is_described or not is_extension_frame(frame)]


def metadata_message(decode, room: int, pages=range(4), **more) -> list[bytes]:
    """Returns the message with which this decode rank requests a room's pages from prefill."""
    asked = {"required_dst_info_num": 1, "aux_index": 0, "state_indices": None}
    asked |= {"decode_prefix_len": None, "is_dummy": False, **more}
    if IS_0_5_18:
        kind = RECEIVERS[backend_of(decode)]
        return fakes_0_5_18.metadata_message(decode, kind, room, pages, **asked)
    return decode.build_receiver_metadata_message(
        bootstrap_room=room, kv_indices=np.array(pages, np.int32), **asked
    )


def status_message(prefill, room: int, status: KVPoll, reason: str) -> list[bytes]:
    """Returns the message with which this prefill rank tells decode how a room ended."""
    if IS_0_5_18:
        prefill.status_readers.add(ENDPOINT)
    prefill.send_kv_status_message(
        targets=[ENDPOINT], bootstrap_room=room, status=status, failure_reason=reason
    )
    ((_, frames),) = prefill.notified
    return frames


def apply_failure(decode, room: int, rank: int, reason: str) -> None:
    """Lets a decode rank note that a room has failed on this prefill rank."""
    if IS_0_5_18:
        decode.apply_status(room, KVPoll.Failed, rank, reason)
        return
    decode.apply_prefill_status(
        bootstrap_room=room, status=KVPoll.Failed, prefill_rank=rank, failure_reason=reason
    )


class EndOfMessages(BaseException):
    """Raised by `FakeSocket` when all messages have been read."""


class FakeSocket:
    def __init__(self, messages: list[list[bytes]]):
        self.messages = list(messages)

    def recv_multipart(self) -> list[bytes]:
        if not self.messages:
            raise EndOfMessages
        return list(self.messages.pop(0))


START_METHODS = {
    ("mooncake", PREFILL): "start_prefill_thread",
    ("mooncake", DECODE): "start_decode_thread",
    ("nixl", PREFILL): "_start_bootstrap_thread",
    ("nixl", DECODE): "_read_messages" if IS_0_5_18 else "_start_decode_listener_thread",
}
STAGING_START_METHOD = "_start_decode_staging_thread"  # of 0.5.18's NIXL on decode


def process_messages(manager, *messages: list[bytes]) -> None:
    """Runs the engine's reader thread over these messages, in the calling thread.

    Raises:
        Exception: Whatever would crash the thread.
    """
    manager.server_socket = FakeSocket(messages)
    start = START_METHODS[backend_of(manager), manager.disaggregation_mode]
    if start == "_read_messages" and manager.enable_staging:
        start = STAGING_START_METHOD
    with (
        mock.patch.object(threading.Thread, "start", threading.Thread.run),
        contextlib.suppress(EndOfMessages),
    ):
        getattr(manager, start)()


def register(prefill, decode, is_described: bool = True) -> None:
    """Lets prefill read a decode rank's registration; a stock rank's if not `is_described`."""
    process_messages(prefill, registration_message(decode, is_described))


def send_metadata(prefill, decode, room: int, **more) -> None:
    """Lets prefill read a decode rank's request for a room."""
    if IS_0_5_18:
        fakes_0_5_18.note_reader(prefill, decode)
    process_messages(prefill, metadata_message(decode, room, **more))


def new_sender(prefill, room: int, kind: type | None = None):
    """Makes the sender of a prefill request; of the backend's class by default."""
    kind = kind or SENDERS[backend_of(prefill)]
    more = {"dest_tp_ranks": [0], "pp_rank": 0} if IS_0_5_18 else {}
    return kind(prefill, ADDRESS, room, **more)


def request_rooms(prefill, decode, *rooms: int, is_described: bool = True, **more) -> None:
    """Registers a decode rank, which then requests rooms whose requests prefill has got."""
    prefill.request_status |= dict.fromkeys(rooms, KVPoll.Bootstrapping)
    register(prefill, decode, is_described)
    for room in rooms:
        send_metadata(prefill, decode, room, **more)


def add_chunk(
    prefill, room: int, pages=range(4), start: int = 0, is_last: bool = True, **more
) -> None:
    """Queues a chunk of a room: its pages, of which the first is the request's page `start`."""
    numbers = np.array(pages, np.int32)
    where = slice(start, start + len(numbers))
    more = {"aux_index": 0, **more}
    if IS_0_5_18 and backend_of(prefill) == "nixl":
        more.setdefault("chunk_id", 0)
    prefill.add_transfer_request(room, numbers, where, is_last, **more)


class UntilEmpty:
    """A transfer queue for a worker in the calling thread, which ends when nothing is queued."""

    def __init__(self, queue):
        self.queue = queue

    def get(self):
        if not _queued_in(self.queue):
            self.queue.put(None)
            self.queue.get()  # a worker has ended its chunk once it asks for the next one
            raise EndOfMessages
        return self.queue.get()


def run_worker(prefill) -> None:
    """Sends all queued chunks; raises what would crash a transfer worker's thread."""
    if backend_of(prefill) == "mooncake":
        run_mooncake_worker(prefill)
        return
    (queue,) = prefill.transfer_queues
    with contextlib.suppress(EndOfMessages):
        prefill.transfer_worker(UntilEmpty(queue))


def run_mooncake_worker(prefill) -> None:
    """Runs a transfer worker until its server stops; raises what would crash its thread."""
    (queue,) = prefill.transfer_queues
    with ThreadPoolExecutor(1) as executor, contextlib.suppress(EndOfMessages):
        if IS_0_5_18:  # whose workers never end
            prefill.transfer_worker(UntilEmpty(queue), executor)
        queue.put(None)
        prefill.transfer_worker(queue, executor)
    assert not queued_chunks(prefill)


def finish_failed(side) -> str:
    """Finishes a failed request as the scheduler does; returns the reason that its client gets.

    Args:
        side: The request's sender or receiver.
    """
    assert side.poll() == KVPoll.Failed
    try:
        side.failure_exception()
    except common.KVTransferError as error:
        if IS_0_5_18:
            side.clear()  # NIXL's receivers leave it to the scheduler
        return error.failure_reason
    raise AssertionError("the request raises no failure")


def queued_chunks(prefill) -> int:
    """Counts the chunks in the transfer queue."""
    (queue,) = set(prefill.transfer_queues)
    return _queued_in(queue)


def _queued_in(queue) -> int:
    return len(queue._buf) if isinstance(queue, FastQueue) else len(queue)


def backend_of(manager) -> str:
    return "nixl" if isinstance(manager, nixl.EngineNixlKVManager) else "mooncake"


def registered_peer(prefill):
    """Returns the registration of this prefill rank's only decode rank."""
    (info,) = prefill.decode_kv_args_table.values()
    return info


def send_nixl_pages(prefill, own, theirs):
    """Starts to write these pages of KV to a NIXL rank's only peer; returns NIXL's handle."""
    pointers = registered_peer(prefill).dst_kv_ptrs
    return prefill.send_kvcache(PEER["nixl"], own, pointers, theirs, 0, *NOTICE)


def send_nixl_state(prefill, own, theirs) -> list:
    """Starts to write these pages of each kind of state; returns NIXL's handles."""
    info = registered_peer(prefill)
    more = {"dst_state_item_lens": info.dst_state_item_lens, "decode_tp_rank": 0}
    where = (own, info.dst_state_data_ptrs, theirs)
    return list(prefill.maybe_send_extra(PEER["nixl"], *where, 0, *NOTICE, 1, **more))


def prealloc_queue(decode):
    """Returns the queue in which decode's scheduler holds requests of unknown servers."""
    queue = object.__new__(DecodePreallocQueue)
    queue.kv_manager = decode
    queue._ensure_retry_count, queue._ensure_last_attempt_time = {}, {}
    queue._ensure_retry_interval, queue._max_ensure_retries = 0.0, 15
    return queue


def resolve_dp_rank(decode, address: str, room: int) -> int | None:
    """Returns the DP rank from which decode's scheduler requests a room; None while unknown."""
    queue = prealloc_queue(decode)
    host, port = address.split(":")
    req = SimpleNamespace(bootstrap_host=host, bootstrap_port=int(port), bootstrap_room=room)
    req.disagg_prefill_dp_rank = None
    return queue._resolve_prefill_dp_rank(req)


def posted_copies(prefill) -> list[tuple[int, int, int]]:
    """Returns (source address, destination address, bytes) of all copies that were posted."""
    return (prefill.agent if backend_of(prefill) == "nixl" else prefill.engine).transfers


def sent_units(manager) -> list[list[bytes]]:
    """Returns the messages to decode that name chunks which it must interleave."""
    return [frames for _, frames in manager.notified if frames[0] == UNITS]


def sent_statuses(manager) -> list[tuple[int, int, str]]:
    """Returns (room, status, reason) of each status message that was sent to decode."""
    sent = [frames for _, frames in manager.notified if frames[0] != UNITS]
    parse = fakes_0_5_18.parse_status if IS_0_5_18 else manager.parse_kv_status_message
    parsed = map(parse, sent)
    return [(room, status, reason) for room, status, _, reason in parsed]
