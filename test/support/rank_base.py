"""What ranks of all releases share: the engine's pools, their contents, and a request's life."""

import importlib
import logging
import logging.handlers
import os
import resource
import sys
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from rank_attacks import ATTACKS, flood
from rank_corruptions import TransferCorruptions
from rank_faults import AgentCalls, TransferFaults, cut_connections, fail_next_registration
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
from rank_write_log import WriteLog
from sglang.srt.disaggregation import prefill  # before decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodePreallocQueue
from sglang.srt.disaggregation.utils import (
    KVClassType,
    MetadataBuffers,
    TransferBackend,
    get_kv_class,
    is_mla_backend,
    poll_and_all_reduce,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from slow_links import metadata_of_slow_proxy

from pd_harness.polling import own_time, wait_until

try:
    from sglang.srt.disaggregation.pd import peer_sockets
except ImportError:  # stock has none
    peer_sockets = None

HOST = "127.0.0.1"
POLL_INTERVAL = 0.002  # seconds between two polls; a scheduler polls more often
MAX_SENT_PER_TURN = 8  # requests whose KV a scheduler sends in one turn
AUX_SLOTS = 8
HIDDEN_STATES = 8  # the row's index
UNWRITTEN = 0xA5
LATE_SECONDS = 3.0
NO_LAYER = 64
COMPONENTS = (
    *("k", "v", "kv", "index_k", "state", "state_k", "state_v"),
    *("state_conv", "state_temporal"),
)


def heads_by_rank(total: int, ranks: int) -> list[list[int]]:
    """Returns each rank's KV heads; with fewer heads than ranks, consecutive ranks share a head."""
    if total >= ranks:
        return [hand.tolist() for hand in np.array_split(np.arange(total), ranks)]
    return [[head] for head in range(total) for _ in range(ranks // total)]


def decode_slot(room: int) -> int:
    """Returns decode's metadata slot of a room; prefill uses another slot."""
    return (room + 3) % AUX_SLOTS


def limit_nixl_threads(count: int) -> None:
    """Gives this process's NIXL agents `count` worker threads instead of the engine's 8."""
    agent = importlib.import_module("nixl._api").nixl_agent
    create = agent.create_backend

    def create_with_few(self, backend, parameters=None):
        parameters = parameters or {}
        if "num_threads" in parameters:
            parameters = {**parameters, "num_threads": str(count)}
        return create(self, backend, parameters)

    agent.create_backend = create_with_few


class RankBase(ABC):
    """A prefill or decode rank; `config` is one element of `fleet.Fleet.ranks`.

    Its public methods are the commands of `fleet.Rank.call`; each returns the command's answer.
    """

    # The manager's tables by room; each backend has some on prefill and others on decode.
    ROOM_TABLES: tuple[str, ...]
    METADATA: dict = {}  # further arguments of this release's metadata buffers

    def __init__(self, config: dict):
        self.config = SimpleNamespace(**config)
        c = self.config
        os.environ.update(c.environment)
        os.environ.update(ASCEND_USE_FIA=str(c.fia), ASCEND_MF_STORE_URL=c.store)
        if c.device == "npu":
            torch.npu.set_device(c.gpu_id)
        self.is_prefill = c.role == "prefill"
        self.is_recurrent = c.hybrid in STATE_SIZE
        self._enter_engine()
        self.heads = {
            False: heads_by_rank(c.kv_heads, c.tp_size)[c.tp_rank],
            True: heads_by_rank(c.draft_heads, c.tp_size)[c.tp_rank],
        }
        self.window_heads = heads_by_rank(c.window_heads or c.kv_heads, c.tp_size)[c.tp_rank]
        self.pool = make_pool(c, pool_layers(c), len(self.heads[False]), len(self.window_heads))
        drafts, heads = range(c.draft_layers), len(self.heads[True])
        self.draft = make_pool(c, drafts, heads, heads) if drafts else None
        hidden = (c.hidden_size, torch.bfloat16) if c.speculates else (16, torch.float32)
        self.aux = MetadataBuffers(AUX_SLOTS, *hidden, **self.METADATA)
        if not self.is_prefill:
            for row in self._aux_rows():
                row.fill_(UNWRITTEN)
        self.expected = {key: buffer.numpy(force=True).copy() for key, buffer in self._buffers()}
        if c.backend == "nixl" and c.device == "cpu":
            limit_nixl_threads(c.nixl_threads)
        self.manager = self._make_manager()
        self.faults = None
        self.corruptions = None
        self.bad_indices = None
        self.agent_calls = None
        self.early = None
        self.open_pollers = {}
        self.group = None

    @abstractmethod
    def _enter_engine(self) -> None:
        """Sets this rank's TP and PP rank in the engine."""

    @abstractmethod
    def _queue_attributes(self) -> dict:
        """Returns the queue's attributes that only this release needs to make its manager."""

    @abstractmethod
    def _scheduler_attributes(self) -> dict:
        """Returns such attributes of the queue's scheduler."""

    @abstractmethod
    def _sender(self, room: int):
        """Makes prefill's KV sender of a room."""

    @abstractmethod
    def _receiver(self, room: int):
        """Makes decode's KV receiver of a room, and waits until it has found prefill."""

    @abstractmethod
    def _send_metadata(self, receiver, pages: list[int], slot: int, state) -> None:
        """Sends prefill the room's pages, metadata slot and state indices."""

    @abstractmethod
    def _state(self, room: int, pages: list[int]):
        """Returns the request's state indices for senders and receivers; None without state."""

    @abstractmethod
    def _state_buffers(self) -> tuple[list[int], list[int]]:
        """Returns addresses and lengths in bytes of the state buffers."""

    @abstractmethod
    def _leave_unsent(self, sender) -> str:
        """Does what the scheduler does with an unsent request; returns `left` if all is freed."""

    def _make_manager(self):
        """Makes the KV manager with the engine's own queue; only the scheduler is a stand-in."""
        c = self.config
        decode_queue = DecodePreallocQueue
        draft = SimpleNamespace(
            get_total_num_kv_heads=lambda: c.draft_heads,
            get_swa_num_kv_heads=lambda _: c.draft_heads,
        )
        draft_runner = SimpleNamespace(model_config=draft)
        queue = object.__new__(prefill.PrefillBootstrapQueue if self.is_prefill else decode_queue)
        queue.__dict__.update(
            token_to_kv_pool=self.pool,
            draft_token_to_kv_pool=self.draft,
            is_mla_backend=is_mla_backend(self.pool),
            metadata_buffers=self.aux,
            tp_rank=c.tp_rank,
            pp_rank=c.pp_rank,
            pp_size=c.pp_size,
            gpu_id=c.gpu_id,
            transfer_backend=TransferBackend(c.backend),
            scheduler=SimpleNamespace(
                gpu_id=c.gpu_id,
                model_config=SimpleNamespace(
                    num_hidden_layers=c.model_layers,
                    get_total_num_kv_heads=lambda: c.kv_heads,
                    get_swa_num_kv_heads=lambda _: c.window_heads or c.kv_heads,
                    hf_text_config=SimpleNamespace(
                        full_attention_layer_ids=range(1, c.model_layers, 2)
                    ),
                ),
                draft_worker=SimpleNamespace(
                    model_config=draft, _draft_model_runners=lambda: (draft_runner,)
                ),
                tp_worker=SimpleNamespace(
                    model_runner=SimpleNamespace(
                        start_layer=c.start_layer,
                        end_layer=c.start_layer + c.layers,
                        kv_cache_dtype_str=c.dtype,
                    )
                ),
                spec_algorithm=SpeculativeAlgorithm.from_string("EAGLE" if c.speculates else None),
                **self._scheduler_attributes(),
            ),
            **self._queue_attributes(),
        )
        if c.backend == "mooncake":
            from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

            mooncake_transfer_engine.init_mooncake_transfer_engine(HOST, 0, None)
        return queue._init_kv_manager()

    def _buffers(self):
        """Yields ((component, is draft, layer), tensor) per buffer of `rank_pools.pool_buffers`."""
        for is_draft, pool in ((False, self.pool), (True, self.draft)):
            if pool is not None:
                for (component, layer), buffer in pool_buffers(pool):
                    yield (component, is_draft, layer), buffer

    def _aux_rows(self) -> list[torch.Tensor]:
        """Returns each metadata buffer as `[slots, bytes]`."""
        names = (
            *("output_ids", "cached_tokens"),
            *("output_token_logprobs_val", "output_token_logprobs_idx"),
            *("output_top_logprobs_val", "output_top_logprobs_idx"),
            *("output_topk_p", "output_topk_index", "output_hidden_states", "bootstrap_room"),
        )
        return [getattr(self.aux, name).view(torch.uint8) for name in names]

    def _write_metadata(self, rows: list[torch.Tensor], room: int, slot: int) -> None:
        """Writes bytes that encode room, row and offset; first token and room are the room."""
        number = torch.tensor([room])
        for i, row in enumerate(rows):
            if i == HIDDEN_STATES and not self.is_prefill and not self.config.sends_hidden_states:
                continue
            said = ((torch.arange(row.shape[1]) + room * 7 + i * 31) % 251).to(torch.uint8)
            if i in (0, len(rows) - 1):
                kind = torch.int64 if i else torch.int32
                said[: kind.itemsize] = number.to(kind).view(torch.uint8)
            row[slot] = said.to(row.device)

    def _class(self, kind: KVClassType):
        return get_kv_class(TransferBackend(self.config.backend), kind)

    def fill(self, room: int, pages: list[int]) -> None:
        """Writes prefill's result: this rank's heads of every token in the request's pages.

        A layer that this rank's stage does not compute gets values that no layer has.
        """
        c = self.config
        for (component, is_draft, layer), buffer in self._buffers():
            array = buffer.cpu().numpy()
            computed = is_draft or 0 <= layer - c.start_layer < c.layers or c.hybrid != "swa"
            says = layer if computed else layer + NO_LAYER
            self._write(array, (component, is_draft, says), room, pages)
            buffer.copy_(torch.from_numpy(array))

    def _write(self, buffer: np.ndarray, key: tuple, room: int, pages: list[int]) -> None:
        """Writes elements that encode room, component, model, layer, head, token and element."""
        component, is_draft, layer = key
        if component.startswith("state"):
            pages = self._state_slots(room, pages)
        number = COMPONENTS.index(component) * 2 + is_draft
        if buffer.dtype == np.uint8:
            rows = np.zeros(1, int)
            if self.is_recurrent:
                rows = state_rows(self.config, component, buffer.shape[1])
            for i, page in enumerate(pages):
                start = room * 7 + layer * 31 + i * 13 + number * 59 + rows[:, None] * 101
                says = (start + np.arange(buffer.shape[-1])) % 251
                buffer[page] = says if self.is_recurrent else says[0]
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
            number_of = (((number * 128 + layer) * 64 + head) * 65536 + token) * 64 + element
            buffer[page * size : (page + 1) * size] = number_of

    def send(self, room: int, pages: list[int], chunks: list[int], seconds: float) -> dict:
        """Runs a request on prefill: waits for decode, then sends its pages in these chunks.

        Args:
            chunks: Pages per chunk.
            seconds: Limit for each of the two waits.
        """
        self.fill(room, pages)
        sender = self.open_pollers.pop(room, None) or self._sender(room)
        end = self._await(sender, seconds, leave_at=KVPoll.WaitingForInput)
        if end["state"] != "waiting":
            return end
        slot = room % AUX_SLOTS
        self._write_metadata(self._aux_rows(), room, slot)
        sender.init(len(pages), slot)
        at = 0
        for chunk in chunks:
            part, at = pages[at : at + chunk], at + chunk
            state = self._state(room, pages) if at == len(pages) else None  # with the last chunk
            sender.send(np.array(part, dtype=np.int32), state)
        return self._await(sender, seconds)

    def send_at_once(self, requests: list, seconds: float) -> dict:
        """Sends several requests, `[room, pages]` each, and polls their senders in turns.

        A turn sends at most `MAX_SENT_PER_TURN` of them. `ends` are the requests' answers as
        `send` returns them, in this order, with the seconds that each took. `pause` is the
        longest turn in seconds, without the time in which other processes had this thread's core.
        """
        for room, pages in requests:
            self.fill(room, pages)
        begun, turn = time.monotonic(), own_time()
        senders = [self._sender(room) for room, _ in requests]
        ends: list[dict | None] = [None] * len(requests)
        sent: set[int] = set()
        pause = 0.0
        while None in ends and time.monotonic() - begun < seconds:
            batch = len(sent) + MAX_SENT_PER_TURN
            for at, ((room, pages), sender) in enumerate(zip(requests, senders)):
                if ends[at] is not None:
                    continue
                end = self._await(sender, 0, leave_at=KVPoll.WaitingForInput)
                if end["state"] == "waiting" and room not in sent and len(sent) < batch:
                    sent.add(room)
                    self._write_metadata(self._aux_rows(), room, room % AUX_SLOTS)
                    sender.init(len(pages), room % AUX_SLOTS)
                    sender.send(np.array(pages, dtype=np.int32), None)
                elif end["state"] not in ("waiting", "hang"):
                    ends[at] = {**end, "seconds": round(time.monotonic() - begun, 2)}
            now = own_time()
            pause, turn = max(pause, now - turn), now
            time.sleep(POLL_INTERVAL)
        return {"state": "sent", "ends": [end or {"state": "hang"} for end in ends], "pause": pause}

    def _state_slots(self, room: int, pages: list[int]) -> list[int] | None:
        """Returns the request's state indices; None without state.

        With index keys these are its pages, with a sliding window its last pages' indices in the
        window pool, with recurrent state one slot.
        """
        if self.config.hybrid == "swa":
            return [self.config.pages - page for page in pages[-WINDOW_PAGES:]]
        if self.is_recurrent:
            return [1 + (room if self.is_prefill else room + 3) % MAMBA_SLOTS]
        return pages if isinstance(self.pool, SparseKVPool) else None

    def receive(
        self, room: int, pages: list[int], arrives: list, leave_out: int, seconds: float
    ) -> dict:
        """Runs a request on decode, and then compares every byte of every buffer.

        `arrives` lists [is draft, layer] of what prefill sends. Decode does not request the last
        `leave_out` pages, which no engine does.
        """
        receiver = self._receiver(room)
        slot = decode_slot(room)
        metadata = [row.cpu().clone() for row in self._aux_rows()]
        first = receiver.poll()
        if first != KVPoll.Failed:
            asked = pages[: len(pages) - leave_out]
            self._send_metadata(receiver, asked, slot, self._state(room, asked))
        end = self._await(receiver, seconds)
        if end["state"] != "success":
            return end
        for key, array in self.expected.items():
            if list(key[1:]) in arrives:
                self._write(array, key, room, pages)
        arrived = {key: buffer.cpu().numpy() for key, buffer in self._buffers()}
        wrong = [
            f"{key}: {int((array != self.expected[key]).sum())} of {array.size} elements"
            for key, array in arrived.items()
            if not np.array_equal(array, self.expected[key])
        ]
        self._write_metadata(metadata, room, slot)
        wrong += self._wrong_metadata(metadata)
        receiver.clear()
        return {"state": "wrong" if wrong else "right", "reason": "; ".join(wrong[:4])}

    def _wrong_metadata(self, expected: list[torch.Tensor]) -> list[str]:
        """Returns the unexpected rows, except for those in slots of rooms that are still open."""
        closed = [
            slot for slot in range(AUX_SLOTS) if slot not in map(decode_slot, self.open_pollers)
        ]
        rows = zip(expected, self._aux_rows())
        wrong = [(right != row.cpu()).any(1)[closed].nonzero() for right, row in rows]
        return [
            f"metadata row {i}: slots {[closed[at] for at in slots.flatten().tolist()]}"
            for i, slots in enumerate(wrong)
            if len(slots)
        ]

    def open_room(self, room: int, pages: list[int]) -> dict:
        """Opens a room, on decode, without a wait, so that several can be open."""
        self.open_pollers[room] = self._receiver(room)
        self._send_metadata(self.open_pollers[room], pages, decode_slot(room), None)
        return {"state": "opened"}

    def start_request(self, room: int) -> dict:
        """Starts a request: prefill waits for decode, or decode has not opened the room yet."""
        self.open_pollers[room] = (self._sender if self.is_prefill else self._receiver)(room)
        return {"state": "begun"}

    def abort(self, room: int) -> dict:
        """Aborts a started request or an opened room without waiting for its end."""
        self.open_pollers[room].abort()
        return {"state": "aborted"}

    def wait_for_room(self, room: int, seconds: float) -> dict:
        """Waits for the end of a started or opened room; does not compare what arrived."""
        receiver = self.open_pollers.pop(room)
        end = self._await(receiver, seconds)
        if end["state"] == "success":
            receiver.clear()
        return end

    def wait_for_rooms(self, rooms: list[int], seconds: float) -> dict:
        """Waits for several rooms at once; `ends` are the answers of `wait_for_room`."""
        with ThreadPoolExecutor(len(rooms)) as pool:
            return {"ends": list(pool.map(lambda room: self.wait_for_room(room, seconds), rooms))}

    def reduce_polls(self, port: int) -> dict:
        """Makes the TP ranks of this side all-reduce their polls, as schedulers do."""
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{HOST}:{port}",
            rank=self.config.tp_rank,
            world_size=self.config.tp_size,
        )
        self.group = dist.group.WORLD
        return {"state": "joined"}

    def abort_and_wait(self, room: int, seconds: float) -> dict:
        """Aborts an opened room, and waits for its end."""
        receiver = self.open_pollers.pop(room)
        receiver.abort()
        return self._await(receiver, seconds)

    def leave_unsent(self, room: int, state: str, seconds: float) -> dict:
        """Removes a request unsent from prefill's queue, once it is `waiting` or `failed`."""
        sender = self._sender(room)
        wanted = {"waiting": KVPoll.WaitingForInput, "failed": KVPoll.Failed}[state]
        if not wait_until(lambda: sender.poll() == wanted, seconds, POLL_INTERVAL):
            return {"state": "hang"}
        return {"state": self._leave_unsent(sender)}

    def lose_prefill(self, rooms: list[int], knows: bool) -> dict:
        """Polls rooms of a lost prefill server in turns, as a scheduler does, until all failed.

        Args:
            knows: Whether this rank, and not another one, notices the loss.

        Returns:
            `failed`, a count of rooms, and `longest`, the longest turn in seconds.
        """
        receivers = [self.open_pollers.pop(room) for room in rooms]
        if knows:
            self.manager._handle_node_failure(f"{HOST}:{self.config.bootstrap_port}")
        longest, failed = 0.0, 0
        while receivers:
            begun = time.monotonic()
            polls = poll_and_all_reduce(receivers, self.group)
            ended = [one for one, poll in zip(receivers, polls) if poll == KVPoll.Failed]
            for receiver in ended:
                failed += failure(receiver)["state"] == "failed"
                receivers.remove(receiver)
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.002)
        return {"failed": failed, "longest": longest}

    def abort_after(
        self, room: int, pages: list[int], after: float, seconds: float, aborts: bool = True
    ) -> dict:
        """Aborts a room `after` seconds after it was opened, or before if `after` is negative.

        Args:
            aborts: Whether this rank aborts, and not another one that all-reduces polls with it.

        Returns:
            The room's end with `waited`, its seconds; `over_at`, its time on the monotonic clock;
            and `changed`, the buffers that prefill still writes to afterwards, when the room's
            pages may belong to other requests.
        """
        receiver = self._receiver(room)
        first = receiver.poll()
        if after < 0:
            receiver.abort()
        if first != KVPoll.Failed:
            self._send_metadata(receiver, pages, room % AUX_SLOTS, None)
        if after >= 0:
            time.sleep(after)
            if aborts:
                receiver.abort()
        begun = time.monotonic()
        end = self._await(receiver, seconds)
        over_at = time.monotonic()
        self.expected = {key: buffer.numpy(force=True).copy() for key, buffer in self._buffers()}
        time.sleep(LATE_SECONDS)
        now = {key: buffer.numpy(force=True).copy() for key, buffer in self._buffers()}
        before, self.expected = self.expected, now
        changed = [str(key) for key in now if not np.array_equal(now[key], before[key])]
        return {**end, "changed": changed, "waited": over_at - begun, "over_at": over_at}

    def _await(self, poller, seconds: float, leave_at=None) -> dict:
        ends = {leave_at, KVPoll.Success, KVPoll.Failed}
        reached = wait_until(lambda: {self._poll(poller)} & ends, seconds, POLL_INTERVAL)
        if KVPoll.Failed in reached:
            return self._failed(poller)
        if KVPoll.Success in reached:
            if self.is_prefill and hasattr(poller, "clear"):
                poller.clear()
            return {"state": "success"}
        return {"state": "waiting" if reached else "hang"}

    def _poll(self, poller) -> int:
        if self.group is None:
            return poller.poll()
        (state,) = poll_and_all_reduce([poller], self.group)
        return state

    def _failed(self, poller) -> dict:
        """Does what the scheduler does with a failed room."""
        return failure(poller)

    def _table(self, name: str):
        """Returns the manager's table of this name, or None."""
        return getattr(self.manager, name, None)

    def set_peer_close_delay(self, seconds: float) -> dict:
        """Sets the delay, by default a minute, after which sockets to lost peers are closed."""
        peer_sockets.CLOSE_AFTER_SECONDS = seconds
        return {"state": "set"}

    def room_counts(self) -> dict:
        """Counts the rooms in each of the manager's `ROOM_TABLES`."""
        tables = {name: self._table(name) for name in self.ROOM_TABLES}
        kept = {name: len(table) for name, table in tables.items() if table is not None}
        if "addr_to_rooms_tracker" in kept:
            kept["addr_to_rooms_tracker"] = sum(map(len, tables["addr_to_rooms_tracker"].values()))
        return kept

    def release_peers_after(self, seconds: float, max_released: int) -> dict:
        """Makes prefill release decode ranks after `seconds` of silence.

        Prefill keeps `max_released` of them and drops the others.
        """
        from sglang.srt.disaggregation.pd import peer_silence, peer_sockets

        peer_sockets.CLOSE_AFTER_SECONDS = peer_silence.RELEASE_AFTER_SECONDS = seconds
        peer_silence.MAX_RELEASED_PEERS = max_released
        return {"state": "set"}

    def peers(self) -> dict:
        """Counts the decode ranks that are registered with this prefill rank."""
        return {"known": len(self.manager.decode_kv_args_table)}

    def plan_faults(self, **plan) -> dict:
        """See `rank_faults.TransferFaults.plan`."""
        self.faults = self.faults or TransferFaults(self.manager)
        self.faults.plan(**plan)
        return {"state": "planned"}

    def delayed_transfer(self) -> dict:
        """Returns when the last delayed transfer started; see `rank_faults.TransferFaults`."""
        return {"began_at": self.faults.began_at}

    def corrupt_transfers(self, what: str) -> dict:
        """See `rank_corruptions.TransferCorruptions`."""
        self.corruptions = self.corruptions or TransferCorruptions(self.manager)
        self.corruptions.what = what
        return {"state": "planned"}

    def use_bad_indices(self, what: str) -> dict:
        """See `rank_bad_indices.BadIndices`."""
        from rank_bad_indices import BadIndices  # imports Mooncake, which not every rank has

        self.bad_indices = self.bad_indices or BadIndices(self.manager)
        self.bad_indices.what = what
        return {"state": "planned"}

    def verify_results(self) -> dict:
        """Returns this decode rank's comparisons by prefill rank, and the mismatches."""
        (report,) = self.manager.kv_args.verifier.reports.by_address.values()
        pairs = {who: msgspec.structs.asdict(count) for who, count in report.pairs.items()}
        return {"pairs": pairs, "said": report.said}

    def fail_next_registration(self, what: str) -> dict:
        """See `rank_faults.fail_next_registration`."""
        fail_next_registration(self.manager, what)
        return {"state": "planned"}

    def record_writes(self) -> dict:
        """See `rank_write_log.WriteLog`."""
        self.write_log = WriteLog(self.manager)
        return {"state": "noted"}

    def writes_outside(self, ranges: list[list[int]]) -> dict:
        """Counts the writes since `record_writes`, and lists those outside of these ranges.

        Ranges and listed writes are [address, bytes].
        """
        return {"done": len(self.write_log), "outside": self.write_log.outside(ranges)}

    def registered_buffers(self) -> list[list[int]]:
        """Returns [address, bytes] of each buffer that prefill may write to."""
        args = self.manager.kv_args
        state_ptrs, state_lens = self._state_buffers()
        ptrs = [*args.kv_data_ptrs, *args.aux_data_ptrs, *state_ptrs]
        lens = [*args.kv_data_lens, *args.aux_data_lens, *state_lens]
        return [[int(ptr), int(size)] for ptr, size in zip(ptrs, lens)]

    def rebaseline(self) -> dict:
        """Takes the buffers' current contents as right, after a request that went wrong."""
        self.expected = {key: buffer.numpy(force=True).copy() for key, buffer in self._buffers()}
        return {"state": "accepted"}

    def attack(self, what: str) -> dict:
        """Starts an attack of `rank_attacks.ATTACKS`, or stops the last one if `what` is empty."""
        if what:
            self.attacked = ATTACKS[what]()
        else:
            self.attacked.stop()
        return {"state": "attacked" if what else "at peace"}

    def flood(self, port: int) -> dict:
        """Floods the decode rank at this port; see `rank_attacks.flood`."""
        if peer_sockets is None:
            send = self.manager._connect(f"tcp://{HOST}:{port}").send_multipart
        else:
            socket = peer_sockets.PeerSocket.to(HOST, port)

            def send(frames, flags):
                socket.send_multipart(frames)

        return {"sent": flood(send)}

    def cut_connections(self) -> dict:
        """See `rank_faults.cut_connections`."""
        return {"cut": cut_connections()}

    def count_early_connections(self) -> dict:
        """Counts NIXL's early connections to decode ranks since the first call."""
        logger = logging.getLogger("sglang.srt.disaggregation.pd.early_connections")
        if self.early is None:
            self.early = logging.handlers.BufferingHandler(1 << 30)
            logger.addHandler(self.early)
            logger.setLevel(logging.INFO)
        said = [record.getMessage() for record in self.early.buffer]
        return {"count": sum(line.startswith("Connected to decode ") for line in said)}

    def slow_connections(self, seconds: float) -> dict:
        """Makes this rank register with metadata of a slow proxy; see `slow_links`.

        Peers that read the metadata reach this rank with `seconds` of latency in each direction.
        """
        agent, manager = self.manager.agent, self.manager
        slow = metadata_of_slow_proxy(agent.get_agent_metadata(), seconds, {manager.rank_port})
        agent.get_agent_metadata = lambda: slow
        return {"state": "slow"}

    def count_agent_calls(self) -> dict:
        """Returns the counts of `rank_faults.AgentCalls` since the first call."""
        if self.agent_calls is None:
            self.agent_calls = AgentCalls(sys.modules["nixl._api"])
        return {"count": self.agent_calls.count, "at_once": self.agent_calls.at_once}

    def nixl(self) -> dict:
        """Returns the file from which this rank imported NIXL."""
        return {"file": sys.modules["nixl._api"].__file__}

    def health(self) -> dict:
        """Returns what faults and foreign messages must not change, and peak memory in bytes."""
        return {
            "port": self.manager.rank_port,
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "files": len(os.listdir("/proc/self/fd")),
            "sockets": len(peer_sockets.open_sockets()) if peer_sockets else 0,
            "peers": len(getattr(self.manager, "decode_kv_args_table", ())),
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }


def failure(poller) -> dict:
    """Returns a failed room's end with the reason, which the scheduler gets as an exception."""
    try:
        poller.failure_exception()
    except Exception as error:
        return {"state": "failed", "reason": str(error)}
    return {"state": "failed", "reason": ""}
