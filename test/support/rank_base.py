"""What ranks of all releases share: the manager, a request's life, and what tests do to a rank."""

import importlib
import logging
import logging.handlers
import os
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from engine_release import SINCE_0_5_18
from rank_attacks import ATTACKS, flood
from rank_contents import AUX_SLOTS, KVContents, MetadataRows, decode_slot
from rank_corruptions import TransferCorruptions
from rank_faults import AgentCalls, TransferFaults, cut_connections, fail_next_registration
from rank_packing import PackingCommands, PackingCounts
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
from pd_harness.ports import HOST

try:
    from sglang.srt.disaggregation.pd import peer_sockets
except ImportError:  # stock has none
    peer_sockets = None

POLL_INTERVAL = 0.002  # seconds between two polls; a scheduler polls more often
MAX_SENT_PER_TURN = 8  # requests whose KV a scheduler sends in one turn
LATE_SECONDS = 3.0


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


class RankBase(PackingCommands):
    """A prefill or decode rank; `config` is one element of `fleet.Fleet.ranks`.

    Its public methods are the commands of `fleet.Rank.call`; each returns the command's answer,
    or None for `{"state": "done"}`. A subclass per release has

        _enter_engine()            sets this rank's TP and PP rank in the engine
        _queue_attributes()        attributes that only this release's queue needs for its manager
        _scheduler_attributes()    such attributes of the queue's scheduler
        _sender(room)              makes prefill's KV sender
        _receiver(room)            makes decode's KV receiver, and waits until it has found prefill
        _send_metadata(receiver, pages, slot, state)
                                   sends prefill the room's pages, metadata slot and state indices
        _leave_unsent(sender)      does what the scheduler does with an unsent request; returns
                                   `left` if all is freed
        _messages_to_prefill(room, pages)
                                   returns a registration, the room's metadata, its ABORT, and an
                                   unopened room's ABORT
        _messages_to_decode(room)  returns statuses of success and of failure, the chunks to
                                   interleave (in 0.5.9 with a status of success), and with
                                   Mooncake the room's aux data
        _drop_room(room)           drops a finished room that has neither a sender nor a receiver
    """

    # The manager's tables by room; each backend has some on prefill and others on decode.
    ROOM_TABLES: tuple[str, ...]
    PREFILL_SECONDS = 15  # for which a receiver queries prefill's server
    PREFILL_POLL_SECONDS = POLL_INTERVAL  # between two looks for the answer
    METADATA: dict = {}  # further arguments of this release's metadata buffers

    def __init__(self, config: dict):
        c = self.config = SimpleNamespace(**config)
        if c.device != "cpu":
            torch.get_device_module(c.device).set_device(c.gpu_id)
        self.is_prefill = c.role == "prefill"
        self._enter_engine()
        self.kv = KVContents(c)
        hidden = (c.hidden_size, torch.bfloat16) if c.speculates else (16, torch.float32)
        self.aux = MetadataBuffers(AUX_SLOTS, *hidden, **self.METADATA)
        self.metadata = MetadataRows(c, self.aux)
        self.kv.rebaseline()
        if c.backend == "nixl" and c.device == "cpu":
            limit_nixl_threads(c.nixl_threads)
        self.packing_counts = PackingCounts()
        self.manager = self._make_manager()
        self.bootstrap_address = f"{HOST}:{c.bootstrap_port}"
        self.instruments: dict[type, object] = {}
        self.open_pollers: dict = {}
        self.group = None

    def _make_manager(self):
        """Makes the KV manager with the engine's own queue; only the scheduler is a stand-in."""
        c = self.config
        draft = SimpleNamespace(
            get_total_num_kv_heads=lambda: c.draft_heads,
            get_swa_num_kv_heads=lambda _: c.draft_heads,
        )
        draft_runner = SimpleNamespace(model_config=draft)
        kind = prefill.PrefillBootstrapQueue if self.is_prefill else DecodePreallocQueue
        queue = object.__new__(kind)
        queue.__dict__.update(
            token_to_kv_pool=self.kv.pool,
            draft_token_to_kv_pool=self.kv.draft,
            is_mla_backend=is_mla_backend(self.kv.pool),
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

    def _class(self, kind: KVClassType):
        return get_kv_class(TransferBackend(self.config.backend), kind)

    def _state(self, room: int, pages: list[int]):
        """Returns the request's state indices for senders and receivers; None without state."""
        slots = self.kv.state_slots(room, pages)
        return None if slots is None else np.array(slots, dtype=np.int32)

    def send(self, room: int, pages: list[int], chunks: list[int], seconds: float) -> dict:
        """Runs a request on prefill: waits for decode, then sends its pages in these chunks.

        Args:
            chunks: Pages per chunk.
            seconds: Limit for each of the two waits.
        """
        self.kv.fill(room, pages)
        sender = self.open_pollers.pop(room, None) or self._sender(room)
        end = self._await(sender, seconds, leave_at=KVPoll.WaitingForInput)
        if end["state"] != "waiting":
            return end
        self._init(sender, room, pages)
        at = 0
        for chunk in chunks:
            part, at = pages[at : at + chunk], at + chunk
            state = self._state(room, pages) if at == len(pages) else None  # with the last chunk
            sender.send(np.array(part, dtype=np.int32), state)
        return self._await(sender, seconds)

    def _init(self, sender, room: int, pages: list[int]) -> None:
        """Writes the room's metadata, and gives the sender the slot and the number of pages."""
        slot = room % AUX_SLOTS
        self.metadata.write(self.metadata.rows, room, slot)
        sender.init(len(pages), slot)

    def send_at_once(self, requests: list, seconds: float) -> dict:
        """Sends several requests, `[room, pages]` each, and polls their senders in turns.

        A turn sends at most `MAX_SENT_PER_TURN` of them. `ends` are the requests' answers as
        `send` returns them, in this order, with the seconds that each took. `pause` is the
        longest turn in seconds, without the time in which other processes had this thread's core.
        """
        for room, pages in requests:
            self.kv.fill(room, pages)
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
                    self._init(sender, room, pages)
                    sender.send(np.array(pages, dtype=np.int32), None)
                elif end["state"] not in ("waiting", "hang"):
                    ends[at] = {**end, "seconds": round(time.monotonic() - begun, 2)}
            now = own_time()
            pause, turn = max(pause, now - turn), now
            time.sleep(POLL_INTERVAL)
        return {"state": "sent", "ends": [end or {"state": "hang"} for end in ends], "pause": pause}

    def receive(self, room: int, pages: list[int], seconds: float, leave_out: int = 0) -> dict:
        """Runs a request on decode, and then compares every byte of every buffer.

        Decode does not request the last `leave_out` pages, which no engine does.
        """
        receiver = self._receiver(room)
        slot = decode_slot(room)
        metadata = self.metadata.copies()
        if receiver.poll() != KVPoll.Failed:
            asked = pages[: len(pages) - leave_out]
            self._send_metadata(receiver, asked, slot, self._state(room, asked))
        end = self._await(receiver, seconds)
        if end["state"] != "success":
            return end
        self.kv.expect(room, pages)
        self.metadata.write(metadata, room, slot)
        wrong = self.kv.unexpected()
        wrong += self.metadata.unexpected(metadata, set(map(decode_slot, self.open_pollers)))
        receiver.clear()
        return {"state": "wrong" if wrong else "right", "reason": "; ".join(wrong[:4])}

    def open_room(self, room: int, pages: list[int]) -> None:
        """Opens a room, on decode, without a wait, so that several can be open."""
        self.start_request(room)
        self._send_metadata(self.open_pollers[room], pages, decode_slot(room), None)

    def start_request(self, room: int) -> None:
        """Starts a request: prefill waits for decode, or decode has not opened the room yet."""
        self.open_pollers[room] = (self._sender if self.is_prefill else self._receiver)(room)

    def abort(self, room: int) -> None:
        """Aborts a started request or an opened room without waiting for its end."""
        self.open_pollers[room].abort()

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

    def reduce_polls(self, port: int) -> None:
        """Makes the TP ranks of this side all-reduce their polls, as schedulers do."""
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{HOST}:{port}",
            rank=self.config.tp_rank,
            world_size=self.config.tp_size,
        )
        self.group = dist.group.WORLD

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
            self.manager._handle_node_failure(self.bootstrap_address)
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
        return self._end_of_abort(receiver, seconds)

    def _end_of_abort(self, receiver, seconds: float) -> dict:
        begun = time.monotonic()
        end = self._await(receiver, seconds)
        over_at = time.monotonic()
        before = self.kv.snapshot()
        time.sleep(LATE_SECONDS)
        self.kv.rebaseline()
        now = self.kv.expected
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

    def rebaseline(self) -> None:
        """Takes the buffers' current contents as right, after a request that went wrong."""
        self.kv.rebaseline()

    def record_messages(self, room: int, pages: list[int]) -> list[list[str]]:
        """Returns the messages that this rank would send for a room, frames in hexadecimal."""
        sent = (
            self._messages_to_decode(room)
            if self.is_prefill
            else self._messages_to_prefill(room, pages)
        )
        return [[bytes(frame).hex() for frame in frames] for frames in sent]

    def expect_status(self, room: int) -> None:
        """Opens a room that a later message ends; see `await_status`."""
        self.manager.update_status(room, KVPoll.Bootstrapping)
        if not self.is_prefill:
            self.manager.required_prefill_response_num_table[room] = 1
            self.manager.prefill_response_tracker[room] = set()

    def await_status(self, room: int, seconds: float) -> dict:
        """Waits for the room's last message; its sender's earlier messages have been read then."""
        over = (KVPoll.Success, KVPoll.Failed)
        if not wait_until(lambda: self.manager.check_status(room) in over, seconds, POLL_INTERVAL):
            return {"state": "hang"}
        self._drop_room(room)
        return {"state": "ended"}

    def _table(self, name: str):
        """Returns the manager's table of this name, or None."""
        return getattr(self.manager, name, None)

    def room_counts(self) -> dict:
        """Counts the rooms in each of the manager's `ROOM_TABLES`."""
        tables = {name: self._table(name) for name in self.ROOM_TABLES}
        kept = {name: len(table) for name, table in tables.items() if table is not None}
        if "addr_to_rooms_tracker" in kept:
            kept["addr_to_rooms_tracker"] = sum(map(len, tables["addr_to_rooms_tracker"].values()))
        return kept

    def set_constants(self, module: str, **values) -> None:
        """Sets constants of the patched engine's module `sglang.srt.disaggregation.pd.MODULE`."""
        vars(importlib.import_module(f"sglang.srt.disaggregation.pd.{module}")).update(values)

    def _instrument(self, kind: type):
        """Returns the object of this kind that changes or counts what the manager does."""
        if kind not in self.instruments:
            self.instruments[kind] = kind(self.manager)
        return self.instruments[kind]

    def plan_faults(self, **plan) -> None:
        self._instrument(TransferFaults).plan(**plan)

    def delayed_transfer(self) -> dict:
        """Returns when the last delayed transfer started; see `rank_faults.TransferFaults`."""
        return {"began_at": self._instrument(TransferFaults).began_at}

    def corrupt_transfers(self, what: str) -> None:
        self._instrument(TransferCorruptions).what = what

    def use_bad_indices(self, what: str) -> None:
        from rank_bad_indices import BadIndices  # imports Mooncake, which not every rank has

        self._instrument(BadIndices).what = what

    def count_agent_calls(self) -> dict:
        """Returns the counts of `rank_faults.AgentCalls` since the first call."""
        calls = self._instrument(AgentCalls)
        return {"count": calls.count, "at_once": calls.at_once}

    def fail_next_registration(self, what: str) -> None:
        fail_next_registration(self.manager, what)

    def cut_connections(self) -> dict:
        return {"cut": cut_connections()}

    def attack(self, what: str) -> None:
        """Starts an attack of `rank_attacks.ATTACKS`, or stops the last one if `what` is empty."""
        if what:
            self.attacked = ATTACKS[what]()
        else:
            self.attacked.stop()

    def flood(self, port: int) -> dict:
        """Floods the decode rank at this port; see `rank_attacks.flood`."""
        if peer_sockets is None:
            send = self.manager._connect(f"tcp://{HOST}:{port}").send_multipart
        else:
            socket = peer_sockets.PeerSocket.to(HOST, port)

            def send(frames, flags):
                socket.send_multipart(frames)

        return {"sent": flood(send)}

    def slow_connections(self, seconds: float) -> None:
        """Makes this rank register with metadata of a slow proxy; see `slow_links`.

        Peers that read the metadata reach this rank with `seconds` of latency in each direction.
        """
        agent, manager = self.manager.agent, self.manager
        slow = metadata_of_slow_proxy(agent.get_agent_metadata(), seconds, {manager.rank_port})
        agent.get_agent_metadata = lambda: slow

    def record_writes(self) -> None:
        """Records the writes of this prefill rank from now on; see `writes_outside`."""
        self.write_log = WriteLog(self.manager)

    def written(self) -> dict:
        """Counts the writes since `record_writes`, and their bytes."""
        return {"count": len(self.write_log), "bytes": self.write_log.size()}

    def writes_outside(self, ranges: list[list[int]]) -> dict:
        """Counts the writes since `record_writes`, and lists those outside of these ranges.

        Ranges and listed writes are [address, bytes].
        """
        return {"done": len(self.write_log), "outside": self.write_log.outside(ranges)}

    def registered_buffers(self) -> list[list[int]]:
        """Returns [address, bytes] of each buffer that prefill may write to."""
        args = self.manager.kv_args
        state_ptrs, state_lens = args.state_data_ptrs, args.state_data_lens
        if SINCE_0_5_18:  # a list per kind of state
            state_ptrs, state_lens = sum(state_ptrs, []), sum(state_lens, [])
        ptrs = [*args.kv_data_ptrs, *args.aux_data_ptrs, *state_ptrs]
        lens = [*args.kv_data_lens, *args.aux_data_lens, *state_lens]
        return [[int(ptr), int(size)] for ptr, size in zip(ptrs, lens)]

    def verify_results(self) -> dict:
        """Returns this decode rank's comparisons by prefill rank, and the mismatches.

        `differing` has for each buffer and pair of ranks how many requests differed there.
        """
        (report,) = self.manager.kv_args.verifier.reports.by_address.values()
        pairs = {who: msgspec.structs.asdict(count) for who, count in report.pairs.items()}
        differing = {what: one.requests for what, one in report.differing.items()}
        return {"pairs": pairs, "said": report.said, "differing": differing}

    def note_request(self, room: int) -> None:
        """Notes a request in the manager's log, as the scheduler's queue does."""
        from sglang.srt.disaggregation.pd.noted_requests import note_request

        req = SimpleNamespace(bootstrap_host=HOST, bootstrap_room=room, rid=f"rid-{room}")
        req.origin_input_ids = range(5)
        note_request(self.manager, req, self.bootstrap_address)

    def transfer_log(self) -> dict:
        """Returns whether the manager keeps a log, and whether its transport is metered."""
        transport = getattr(self.manager, "agent", None) or self.manager.engine
        is_metered = type(transport).__name__.startswith("Metered")
        return {"is_on": self.manager.transfer_log.is_on, "is_metered": is_metered}

    def count_early_connections(self) -> dict:
        """Counts NIXL's early connections to decode ranks since the first call."""
        logger = logging.getLogger("sglang.srt.disaggregation.pd.early_connections")
        if not logger.handlers:
            logger.addHandler(logging.handlers.BufferingHandler(1 << 30))
            logger.setLevel(logging.INFO)
        (handler,) = logger.handlers
        said = [record.getMessage() for record in handler.buffer]
        return {"count": sum(line.startswith("Connected to decode ") for line in said)}

    def nixl(self) -> dict:
        """Returns the file from which this rank imported NIXL."""
        return {"file": sys.modules["nixl._api"].__file__}

    def health(self) -> dict:
        """Returns what faults and foreign messages must not change, and what has grown so far.

        That is peak memory in bytes, and the counts of `rank_packing.PackingCounts`.
        """
        return {
            "port": self.manager.rank_port,
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "files": len(os.listdir("/proc/self/fd")),
            "sockets": len(peer_sockets.open_sockets()) if peer_sockets else 0,
            "peers": len(getattr(self.manager, "decode_kv_args_table", ())),
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "packed": self.packing_counts.packed,
            "interleaved": self.packing_counts.interleaved,
        }


def failure(poller) -> dict:
    """Returns a failed room's end with the reason, which the scheduler gets as an exception."""
    try:
        poller.failure_exception()
    except Exception as error:
        return {"state": "failed", "reason": str(error)}
    return {"state": "failed", "reason": ""}
