"""Prefill: heads go as whole rows, packed round by round, or as chunks that decode interleaves.

Real managers; the transfer libraries are fakes, which copy between the ranks' pools.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import packed_ranks
import pytest
import torch
from packed_ranks import CHUNKS, DST, HEAD_BYTES, PAGE, SRC, UNITS, Rank
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    PackedPlan,
    TransferStatus,
    agreed_units,
    decode_units,
    encode_layout,
    encode_units,
    parse_notification,
)
from sglang.srt.disaggregation.mooncake import conn as mooncake
from sglang.srt.disaggregation.nixl import conn as nixl
from sglang.srt.disaggregation.pd import nixl_transfers, packed_sends, packing
from sglang.srt.disaggregation.pd.back_off import PeerBackoff
from sglang.srt.disaggregation.pd.interleaving import Interleaver
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.pool_views import PoolViews
from sglang.srt.disaggregation.pd.sender import ABORTED

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

ROOM, PATIENCE = 7, 10.0
HOST = "127.0.0.1"
# Half of a worker's memory holds one packed buffer of the first chunk, or two of the second.
HALF_BYTES = CHUNKS[0] * PAGE * HEAD_BYTES
ROUNDS = (4, 2)  # of each chunk
OTHER_SRC = [2, 7, 4, 6, 1, 0]

KINDS = {"nixl": nixl.NixlKVManager, "mooncake": mooncake.MooncakeKVManager}
SENDERS = {"nixl": nixl.NixlKVSender, "mooncake": mooncake.MooncakeKVSender}
both_backends = pytest.mark.parametrize("backend", KINDS)


def backend_of(manager) -> str:
    return "nixl" if isinstance(manager, nixl.NixlKVManager) else "mooncake"


@pytest.fixture
def model():
    return packed_ranks.random_model()


@pytest.fixture
def make(make_prefill, monkeypatch):
    """A function that makes a prefill rank's manager, at which decode ranks register."""

    def make(backend: str, rank: Rank, *decodes: Rank, packing_mib: int = 2):
        monkeypatch.setenv("SGLANG_PD_PACKING_MIB", str(packing_mib))
        manager = make_prefill(KINDS[backend], kv_args=rank.args)
        layout = rank.args.layout
        manager.attn_tp_rank, manager.attn_tp_size = layout.tp_rank, layout.tp_size
        if backend == "nixl":
            manager.agent = packed_ranks.CopyingAgent()
        else:
            start_mooncake(manager)
        manager.make_packing(packed_sends.PACKING_THREADS)
        if rank.args.packing is not None:
            packing = rank.args.packing
            packing.free = [tuple(one[:HALF_BYTES] for one in halves) for halves in packing.free]
        for decode in decodes:
            register(manager, decode)
        manager.ranks = (rank, *decodes)  # their memory is written to, whoever else keeps them
        return manager

    return make


def start_mooncake(manager) -> None:
    """Starts a worker; `sent` has the frames of each status message."""
    manager.engine, manager.sent = packed_ranks.CopyingEngine(), []
    manager._connect = lambda *place: SimpleNamespace(send_multipart=manager.sent.append)
    manager.back_off, manager.unsettled_seconds = PeerBackoff(), 0.0
    manager.enable_custom_mem_pool = False
    manager.transfer_queues = [mooncake.FastQueue()]
    work = (manager.transfer_queues[0], ThreadPoolExecutor(1))
    threading.Thread(target=manager.transfer_worker, args=work, daemon=True).start()


def register(manager, decode: Rank, is_described: bool = True, port: int = 1) -> None:
    """Registers a decode rank; as a stock rank, if not `is_described`."""
    args, layout = decode.args, decode.args.layout
    frame = encode_layout(layout) if is_described else b""
    common = {"room": "None", "endpoint": HOST, "dst_port": port, "layout_frame": frame}
    common |= {"dst_kv_ptrs": args.kv_data_ptrs, "dst_kv_item_len": args.kv_item_lens[0]}
    common |= {"dst_aux_ptrs": [], "dst_state_data_ptrs": args.state_data_ptrs}
    if backend_of(manager) == "nixl":
        named = {"agent_name": decode.name, "agent_metadata": b"its", "gpu_id": 0}
        tp = {"decode_tp_rank": layout.tp_rank, "decode_tp_size": layout.tp_size}
        info = nixl.KVArgsRegisterInfo(**common, **named, **tp)
    else:
        named = {"mooncake_session_id": decode.name}
        tp = {"dst_tp_rank": layout.tp_rank, "dst_attn_tp_size": layout.tp_size}
        state = {"dst_state_item_lens": [], "dst_state_dim_per_tensor": []}
        info = mooncake.KVArgsRegisterInfo(**common, **named, **tp, **state)
    manager._plan_transfers(info)
    assert info.plan is not None, info.refusal
    manager.decode_kv_args_table[info.name] = info


def plan_of(manager):
    """The plan of KV for the only decode rank."""
    (info,) = manager.decode_kv_args_table.values()
    return info.plan.kv


def send(manager, chunks=CHUNKS, room: int = ROOM, src=SRC, names=None, state=None):
    """Sends some chunks of a request to decode ranks, by default to all; returns the sender.

    Args:
        state: Its pages of state, on both sides; they go with the last chunk.
    """
    backend, names = backend_of(manager), names or list(manager.decode_kv_args_table)
    sender = SENDERS[backend](manager, "10.0.0.3:1", room, [0], 0)
    for name in names:
        asked = {"room": room, "endpoint": HOST, "dst_port": 1, "dst_aux_index": 0}
        asked |= {"dst_kv_indices": np.array(DST, np.int32), "dst_state_indices": state or []}
        asked |= {"required_dst_info_num": len(names)}
        if backend == "nixl":
            request = nixl.TransferInfo(agent_name=name, **asked)
        else:
            request = mooncake.TransferInfo(mooncake_session_id=name, is_dummy=False, **asked)
        manager._add_room_peer(request, "")
    sender.init(len(src), 0)
    ends = np.cumsum(chunks).tolist()
    for count, end in zip(chunks, ends):
        with_it = state if end == len(src) else None
        sender.send(np.array(src[end - count : end], np.int32), with_it)
    return sender


def assert_ends(sender, status: int) -> None:
    assert wait_until(lambda: sender.poll() == status, PATIENCE), sender.poll()


def failure_of(sender) -> str:
    """Waits until a request has failed; returns the reason, of which decode is notified."""
    assert_ends(sender, KVPoll.Failed)
    with pytest.raises((RuntimeError, mooncake.KVTransferError)) as raised:
        sender.failure_exception()
    return str(raised.value)


def kv_messages(manager, decode: Rank) -> list[bytes]:
    """The notifications of chunks that have arrived on a decode rank."""
    return [message for message in manager.agent.arrived[decode.name] if b"_kv_" in message]


# Prefill has fewer ranks than decode: it packs.


@both_backends
@pytest.mark.parametrize("is_described", [True, False])
def test_packed_rows_arrive_in_their_final_place(make, model, backend, is_described):
    """Decode has nothing to do, so that a stock rank can be served, too."""
    decodes = [Rank(0, 2), Rank(1, 2)]
    manager = make(backend, Rank(0, 1, model))
    for decode in decodes:
        register(manager, decode, is_described)
    assert_ends(send(manager), KVPoll.Success)
    assert all(decode.has_received(model) for decode in decodes)
    if backend == "nixl":
        for decode in decodes:
            assert kv_messages(manager, decode) == [b"7_kv_0_0_0", b"7_kv_1_1_0"]
    else:
        assert wait_until(lambda: len(manager.sent) == 2, PATIENCE)
        assert {len(frames) for frames in manager.sent} == {4 if is_described else 3}


def test_last_round_of_a_chunk_brings_its_notification(make, model):
    decode = Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), decode)
    assert_ends(send(manager), KVPoll.Success)
    notifications = [write.notification for write in manager.agent.rounds(decode.name)]
    assert notifications == [*[b""] * 3, b"7_kv_0_0_0", b"", b"7_kv_1_1_0"]
    assert len(notifications) == sum(ROUNDS)


def test_rounds_are_written_one_after_another_while_the_scheduler_goes_on(make, model):
    """Its pages are kept until the last round has ended, and the decode rank is not released."""
    decode = Rank(0, 2)
    manager = make("nixl", Rank(0, 1, model), decode)
    agent, may_end = manager.agent, 0
    agent.state_of = lambda write: "DONE" if write.number < may_end else "PROC"
    sender = send(manager, CHUNKS[:1])
    for may_end in range(ROUNDS[0]):
        assert wait_until(lambda: len(agent.rounds(decode.name)) > may_end, PATIENCE)  # noqa: B023
        assert sender.poll() == KVPoll.WaitingForInput and sender.has_pending_transfers()
        assert not agent.arrived[decode.name] and not manager.release_peer(decode.name)
    may_end = ROUNDS[0]
    assert wait_until(lambda: (sender.poll(), not sender.has_pending_transfers())[1], PATIENCE)
    assert agent.arrived[decode.name] == [b"7_kv_0_0_0"]
    rounds = agent.rounds(decode.name)
    assert len(rounds) == ROUNDS[0] and all(write.is_alone for write in rounds)
    assert not manager.transfers


def test_decode_rank_that_accepts_nothing_delays_no_other(make, model):
    stuck, live = Rank(0, 2), Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), stuck, live)
    manager.agent.state_of = lambda write: "PROC" if write.peer == stuck.name else "DONE"
    sender = send(manager)
    assert wait_until(lambda: len(kv_messages(manager, live)) == 2, PATIENCE)
    assert live.has_received(model)
    assert sender.poll() == KVPoll.Transferring and not manager.agent.arrived[stuck.name]
    manager.agent.state_of = lambda write: "DONE"
    assert_ends(sender, KVPoll.Success)
    assert stuck.has_received(model)


def test_decode_server_that_accepts_nothing_delays_no_other(make, model):
    """It has more ranks than there are threads, and all but one of these wait for it."""
    stuck, live = [Rank(number, 4) for number in range(4)], Rank(0, 2)
    live.args.engine_rank = 9  # its name
    manager = make("nixl", Rank(0, 1, model), *stuck, live)
    agent, names = manager.agent, [one.name for one in stuck]
    agent.state_of = lambda write: "PROC" if write.peer in names else "DONE"

    def busy() -> int:
        return sum(bool(agent.rounds(name)) for name in names)

    first = send(manager, names=names)
    assert wait_until(lambda: busy() == packed_sends.PACKING_THREADS - 1, PATIENCE)
    assert_ends(send(manager, room=8, names=[live.name]), KVPoll.Success)
    assert live.has_received(model)
    assert busy() == packed_sends.PACKING_THREADS - 1
    agent.state_of = lambda write: "DONE"
    assert_ends(first, KVPoll.Success)
    assert all(one.has_received(model) for one in stuck)


@pytest.mark.parametrize("when", ["later", "at once"])
def test_failed_round_fails_the_request_and_the_worker_goes_on(make, model, monkeypatch, when):
    monkeypatch.setattr(nixl_transfers, "UNREADABLE_SECONDS", 0.0)
    decode = Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), decode)
    agent = manager.agent

    def answer(usual: str, write) -> str:
        return "ERR" if write.copies and write.number == 1 else usual

    if when == "later":
        agent.state_of, reason = partial(answer, "DONE"), "NIXL reported an error"
    else:
        agent.start_of, reason = partial(answer, "PROC"), "NIXL did not start the transfer"
    sender = send(manager, CHUNKS[:1])
    assert reason in failure_of(sender)
    assert len(agent.rounds(decode.name)) == 2
    *extra_chunk, notice = agent.arrived[decode.name]
    assert len(extra_chunk) == (when == "at once")  # a part may have been posted
    assert notice.startswith(b"7_failed_0_Prefill's write to decode failed: ")
    manager.check_peers()
    assert not manager.abandoned_transfers and not manager.transfers
    agent.start_of, agent.state_of = lambda write: "PROC", lambda write: "DONE"
    assert_ends(send(manager, room=8, src=OTHER_SRC), KVPoll.Success)
    assert decode.has_received(model, OTHER_SRC)


def test_chunk_that_cannot_be_packed_fails_the_request(make, model, monkeypatch):
    def fail(*_) -> None:
        raise RuntimeError("no memory")

    decode = Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), decode)
    with monkeypatch.context() as full:
        full.setattr(packing, "pack", fail)
        sender = send(manager, CHUNKS[:1])
        assert "no memory" in failure_of(sender)
    assert not manager.agent.rounds(decode.name)
    assert_ends(send(manager, room=8), KVPoll.Success)
    assert decode.has_received(model)


@both_backends
def test_request_fails_only_once_its_pages_are_read_no_more(
    make, model, monkeypatch, caplog, backend
):
    """A write raises while the next round is packed; the log keeps the error, and its frames."""
    monkeypatch.setattr(nixl_transfers, "UNREADABLE_SECONDS", 0.0)
    manager = make(backend, Rank(0, 1, model), Rank(1, 2))
    entered, go_on, pack = threading.Event(), threading.Event(), packing.pack

    def pack_later(one, *rest) -> None:
        if one.group.buffers != (0,):
            entered.set()
            assert go_on.wait(PATIENCE)
        pack(one, *rest)

    def fail(write) -> None:
        assert entered.wait(PATIENCE)
        raise RuntimeError("no connection")

    monkeypatch.setattr(packing, "pack", pack_later)
    if backend == "nixl":
        manager.agent.start_of = fail
    else:
        manager.engine.status_of = fail
    sender = send(manager, CHUNKS[:1])
    assert entered.wait(PATIENCE)
    assert not wait_until(lambda: sender.poll() == KVPoll.Failed, 0.3)
    go_on.set()
    assert "no connection" in failure_of(sender)
    assert any(record.exc_info for record in caplog.records)


def test_queued_chunk_of_a_failed_room_is_not_packed(make, model, monkeypatch):
    monkeypatch.setattr(packed_sends, "PACKING_THREADS", 1)
    stuck, live = Rank(0, 2), Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), stuck, live)
    agent, packed, pack = manager.agent, [], packing.pack

    def note(one, *rest) -> None:
        packed.append(one)
        pack(one, *rest)

    monkeypatch.setattr(packing, "pack", note)
    agent.state_of = lambda write: "PROC" if write.peer == stuck.name else "DONE"
    first = send(manager, names=[stuck.name])
    assert wait_until(lambda: agent.rounds(stuck.name), PATIENCE)
    second = send(manager, room=8, names=[live.name])
    second.abort()
    agent.state_of = lambda write: "DONE"
    assert_ends(first, KVPoll.Success)
    assert failure_of(second) == ABORTED
    assert len(packed) == sum(ROUNDS) and not agent.rounds(live.name)


def test_failed_request_is_written_no_further(make, model):
    decode, go_on = Rank(1, 2), threading.Event()
    manager = make("nixl", Rank(0, 1, model), decode)
    agent = manager.agent
    agent.state_of = lambda write: "DONE" if go_on.is_set() else "PROC"
    sender = send(manager, CHUNKS[:1])
    assert wait_until(lambda: agent.rounds(decode.name), PATIENCE)
    sender.abort()
    assert sender.poll() == KVPoll.Transferring  # its pages are still read
    go_on.set()
    assert failure_of(sender) == ABORTED
    assert len(agent.rounds(decode.name)) == 1
    assert agent.arrived[decode.name] == [f"7_failed_0_{ABORTED}".encode()]


def test_silent_decode_rank_leaves_its_worker_free_and_cannot_succeed(make, model, monkeypatch):
    """The only worker writes the last round when the rank falls silent; the rank comes back."""
    monkeypatch.setattr(packed_sends, "PACKING_THREADS", 1)
    silent, live = Rank(0, 2), Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), silent, live)
    agent = manager.agent

    def state_of(write) -> str:
        is_last = write.peer == silent.name and b"_kv_1_" in write.notification
        return "PROC" if is_last else "DONE"

    agent.state_of = state_of
    sender = send(manager)
    assert wait_until(lambda: len(agent.rounds(silent.name)) == sum(ROUNDS), PATIENCE)
    assert sender.poll() == KVPoll.Transferring
    manager.silent_peers = {silent.name: "decode does not answer"}
    assert failure_of(sender).endswith("decode does not answer")
    assert agent.arrived[live.name][-1].startswith(b"7_failed_0_")
    assert_ends(send(manager, room=8, names=[live.name]), KVPoll.Success)
    assert live.has_received(model)

    agent.state_of = lambda write: "DONE"
    manager.check_peers()
    decode, ends = TransferStatus(1), []
    for message in agent.arrived[silent.name]:
        decode.add("prefill", parse_notification(message))
        ends.append((decode.is_done(), decode.is_failed()))
    assert kv_messages(manager, silent)[-1] == b"7_kv_1_1_0"
    assert set(ends[:-1]) == {(False, False)} and ends[-1] == (True, True)
    assert not manager.abandoned_transfers and not manager.transfers


class WindowRank(Rank):
    """A rank that has sliding windows, too, in pools like those of KV."""

    def __init__(self, rank: int, tp_size: int, model=None):
        super().__init__(rank, tp_size, model)
        args, layout = self.args, self.args.layout
        windows = [
            msgspec.structs.replace(buffer, component=f"swa_{buffer.component}")
            for buffer in layout.kv
        ]
        args.layout = msgspec.structs.replace(layout, state=tuple(windows))
        self.state_rows = [torch.clone(rows) for rows in self.rows]
        views = [rows.view(packed_ranks.PAGES, -1) for rows in self.state_rows]
        args.views = PoolViews(args.views.kv, views)
        args.state_data_ptrs = [rows.data_ptr() for rows in self.state_rows]
        args.state_data_lens = [rows.numel() for rows in self.state_rows]
        args.state_item_lens, args.state_type = args.kv_item_lens, "swa"


def test_decode_rank_that_is_silent_before_its_windows_have_arrived_cannot_succeed(
    make, model, monkeypatch
):
    """All of KV and the metadata have; the windows do just as the rank is found to be silent."""
    waits, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        go_on.wait(PATIENCE)

    monkeypatch.setattr(packed_sends, "time", SimpleNamespace(sleep=sleep))
    silent, pages = WindowRank(0, 2), [3, 6]
    manager = make("nixl", WindowRank(0, 1, model), silent)
    agent = manager.agent
    agent.state_of = lambda write: "PROC" if b"_state_" in write.notification else "DONE"
    sender = send(manager, state=pages)
    windows = b"7_state_0"

    def is_sending_windows() -> bool:
        return windows in [write.notification for write in agent.rounds(silent.name)]

    assert wait_until(is_sending_windows, PATIENCE) and waits.wait(PATIENCE)
    assert sender.poll() == KVPoll.Transferring and silent.has_received(model)
    assert agent.arrived[silent.name] == [b"7_kv_0_0_0", b"7_kv_1_1_0", b"7_aux_0"]
    manager.silent_peers = {silent.name: "decode does not answer"}
    (chunk,) = (one for one in manager.transfers if isinstance(one, packed_sends.PackedTransfer))
    assert manager.is_settled(chunk)

    agent.state_of = lambda write: "DONE"
    go_on.set()
    assert wait_until(lambda: chunk not in manager.transfers, PATIENCE)
    assert failure_of(sender).endswith("decode does not answer")

    def settle() -> bool:
        manager.check_peers()
        return not (manager.abandoned_transfers or manager.pending_notices or manager.transfers)

    assert wait_until(settle, PATIENCE)
    decode, ends = TransferStatus(1, expects_state=True), []
    for message in agent.arrived[silent.name]:
        decode.add("prefill", parse_notification(message))
        ends.append((decode.is_done(), decode.is_failed()))
    assert windows in agent.arrived[silent.name]
    assert set(ends[:-1]) == {(False, False)} and ends[-1] == (True, True)


def test_queued_chunk_of_a_silent_decode_rank_is_not_written(make, model, monkeypatch):
    """Its pages are another request's by then."""
    monkeypatch.setattr(packed_sends, "PACKING_THREADS", 1)
    stuck, silent = Rank(0, 2), Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), stuck, silent)
    agent = manager.agent
    agent.state_of = lambda write: "PROC" if write.peer == stuck.name else "DONE"
    first = send(manager, names=[stuck.name])
    assert wait_until(lambda: agent.rounds(stuck.name), PATIENCE)
    second = send(manager, CHUNKS[:1], room=8, names=[silent.name])
    manager.silent_peers = {silent.name: "decode does not answer"}
    assert failure_of(second).endswith("decode does not answer")
    agent.state_of = lambda write: "DONE"
    assert_ends(first, KVPoll.Success)
    assert wait_until(lambda: not manager.transfers, PATIENCE)
    assert not agent.rounds(silent.name)
    assert all(not rows.any() for rows in silent.rows)


def test_lost_connection_is_made_again_between_rounds(make, model, listen):
    decode, (_, port) = Rank(1, 2), listen()
    manager = make("nixl", Rank(0, 1, model))
    register(manager, decode, port=port)
    peer = PeerSocket.to(HOST, port)
    peer.open()
    assert wait_until(lambda: peer.silent_for() == 0, PATIENCE)
    agent = manager.agent

    def lose(write) -> str:
        agent.is_lost = agent.is_lost or write.number == 1
        return "PROC"

    agent.start_of = lose
    sender = send(manager, CHUNKS[:1])
    assert wait_until(lambda: agent.arrived[decode.name], PATIENCE)
    assert agent.arrived[decode.name] == [b"7_kv_0_0_0"] and not agent.is_lost
    assert wait_until(lambda: (sender.poll(), not sender.has_pending_transfers())[1], PATIENCE)
    assert manager.check_status(ROOM) == KVPoll.WaitingForInput
    assert not manager.unreachable_peers


def test_chunk_without_pages_brings_its_notification(make, model):
    decode = Rank(1, 2)
    manager = make("nixl", Rank(0, 1, model), decode)
    assert_ends(send(manager, (0, *CHUNKS)), KVPoll.Success)
    assert kv_messages(manager, decode) == [b"7_kv_0_0_0", b"7_kv_1_0_0", b"7_kv_2_1_0"]
    assert decode.has_received(model)


def test_unit_that_ends_early_leaves_nothing_to_pack(make, model, monkeypatch):
    """Otherwise its round would replace one of the worker's next unit, which is being sent."""
    manager = make("nixl", Rank(0, 1, model), Rank(0, 2))
    entered, go_on, pack = threading.Event(), threading.Event(), packing.pack

    def pack_later(one, *rest) -> None:
        if one.group.buffers != (0,):
            entered.set()
            assert go_on.wait(PATIENCE)
        pack(one, *rest)

    monkeypatch.setattr(packing, "pack", pack_later)
    pages = (SRC[: CHUNKS[0]], DST[: CHUNKS[0]])
    rounds = manager.kv_args.packing.copies("kv", plan_of(manager), *pages)
    assert [len(next(rounds)[0]) > 0 for _ in range(2)] == [False, True]
    assert entered.wait(PATIENCE)
    ending = threading.Thread(target=rounds.close)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    go_on.set()
    ending.join(PATIENCE)
    assert not ending.is_alive()


@both_backends
@pytest.mark.parametrize("packing_mib, whole_rows", [(0, True), (2, False)])
def test_prefill_without_packing_memory_sends_slices(make, model, backend, packing_mib, whole_rows):
    rank, decode = Rank(0, 1, model, whole_rows), Rank(1, 2)
    manager = make(backend, rank, decode, packing_mib=packing_mib)
    assert rank.args.packing is None
    assert plan_of(manager).is_sliced and not isinstance(plan_of(manager), PackedPlan)
    assert_ends(send(manager), KVPoll.Success)
    assert decode.has_received(model) and "packed_sends" not in vars(manager)


@both_backends
def test_packing_memory_is_registered_with_kv(make, model, backend):
    rank, registered = Rank(0, 1, model), []
    manager = make(backend, rank)

    def register_nixl(regions, kind: str) -> bool:
        registered.extend((address, size, kind) for address, size, *_ in regions)
        return True

    def register_mooncake(addresses, lengths) -> int:
        registered.extend(zip(addresses, lengths, ["DRAM"] * len(lengths)))
        return 0

    if backend == "nixl":
        manager.agent.register_memory = register_nixl
    else:
        manager.engine.batch_register = register_mooncake
    manager.register_buffer_to_engine()
    memory = rank.args.packing.memory
    assert memory.data_ptr() % (2 << 20) == 0
    kv = zip(rank.args.kv_data_ptrs, rank.args.kv_data_lens)
    expected = {(memory.data_ptr(), memory.numel()), *kv}
    assert {one[:2] for one in registered} == expected
    assert {one[2] for one in registered} == {"DRAM"}


def test_rank_whose_packing_memory_nixl_refuses_sends_slices(make, model, caplog):
    rank, decode = Rank(0, 1, model), Rank(1, 2)
    manager = make("nixl", rank)
    refused = rank.args.packing.memory.numel()
    manager.agent.register_memory = lambda regions, kind: [one[1] for one in regions] != [refused]
    manager.register_buffer_to_engine()
    assert rank.args.packing is None
    assert f"did not register the {refused:,} bytes in which KV heads are packed" in caplog.text
    register(manager, decode)
    assert plan_of(manager).is_sliced


def test_decode_rank_sets_no_packing_memory_aside(decode):
    decode.make_packing(1)
    assert not hasattr(decode.kv_args, "packing")


def test_mooncake_writes_rounds_in_order(make, model):
    decode = Rank(1, 2)
    manager = make("mooncake", Rank(0, 1, model), decode)
    assert_ends(send(manager), KVPoll.Success)
    written = [{*map(decode.buffer_at, dst)} for dst in manager.engine.written]
    assert written == [{0}, {1}, {2}, {3}, {0, 1}, {2, 3}]


def test_mooncake_writes_nothing_after_a_round_that_failed(make, model):
    decode = Rank(1, 2)
    manager = make("mooncake", Rank(0, 1, model), decode)
    engine = manager.engine
    engine.status_of = lambda number: -1 if number == 2 else 0
    sender = send(manager)
    assert "the transfer engine returned -1 for KV" in failure_of(sender)
    assert wait_until(lambda: manager.sent, PATIENCE)
    assert manager.sent[0][:3] == [b"7", b"0", b"0"] and len(manager.sent[0]) == 4
    assert wait_until(lambda: not len(manager.transfer_queues[0]), PATIENCE)
    assert len(engine.written) == 2
    assert_ends(send(manager, room=8, src=OTHER_SRC), KVPoll.Success)
    assert decode.has_received(model, OTHER_SRC)


# Prefill has more ranks than decode: it names the chunks, and decode interleaves them.


@both_backends
@pytest.mark.parametrize(
    "prefill, decode, is_described, is_named",
    [
        (True, True, True, True),
        (True, False, True, False),  # SGLANG_PD_PACKED=0 on decode, or an older patch set
        (False, True, True, False),
        (True, True, False, False),  # stock
    ],
)
def test_chunks_are_named_only_to_decode_ranks_that_interleave(
    make, model, backend, prefill, decode, is_described, is_named
):
    peer = Rank(0, 1, whole_rows=decode)
    manager = make(backend, Rank(0, 2, model, prefill))
    register(manager, peer, is_described)
    assert_ends(send(manager), KVPoll.Success)
    if backend == "nixl":
        names = [b"_0-4", b"_4-6"] if is_named else [b"", b""]
        stock = [b"7_kv_0_0_0", b"7_kv_1_1_0"]
        assert kv_messages(manager, peer) == [one + more for one, more in zip(stock, names)]
        assert "packed_sends" not in vars(manager)  # the scheduler starts the writes itself
    else:
        (frames,) = wait_until(lambda: manager.sent, PATIENCE)
        assert frames[:3] == [b"7", b"4", b"0"]
        assert len(frames[3:4]) == is_described  # the reason, which stock ranks do not read
        assert frames[4:] == ([b"", encode_units(UNITS)] if is_named else [])


def test_mooncake_names_no_chunks_of_a_failed_room(make, model):
    """Its first chunk was written as a part."""
    manager = make("mooncake", Rank(0, 2, model), Rank(0, 1))
    manager.engine.status_of = lambda number: 0 if number == 1 else -1
    sender = send(manager)
    assert "returned -1 for KV" in failure_of(sender)
    (frames,) = wait_until(lambda: manager.sent, PATIENCE)
    assert frames[1] == b"0" and len(frames) == 4


def named_units(manager, decode: Rank) -> list[tuple[int, int]]:
    """The chunks that a prefill rank has named to a decode rank."""
    if backend_of(manager) == "nixl":
        return [parse_notification(message).unit for message in kv_messages(manager, decode)]
    (frames,) = wait_until(lambda: manager.sent, PATIENCE)
    return decode_units(frames[5])


@both_backends
@pytest.mark.parametrize("prefill_tp", [2, 4])
def test_decode_interleaves_the_chunks_that_all_prefill_ranks_name(
    make, model, backend, prefill_tp
):
    """With TP 4, two ranks have copies of others' heads: they write nothing. One chunk is empty."""
    decode, named = Rank(0, 1), []
    for number in range(prefill_tp):
        manager = make(backend, Rank(number, prefill_tp, model), decode)
        assert_ends(send(manager, (0, *CHUNKS)), KVPoll.Success)
        named.append(named_units(manager, decode))
    assert not decode.has_received(model)
    units = agreed_units(named, prefill_tp, len(DST))
    assert units == [(0, 0), *UNITS]
    job = Interleaver(decode.args).start(prefill_tp, units, np.array(DST, np.int32), None)
    assert wait_until(job.is_done, PATIENCE)
    assert decode.has_received(model)
