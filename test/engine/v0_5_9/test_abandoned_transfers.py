"""NIXL: writes to a silent decode rank, and writes whose state cannot be read."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    Notification,
    TransferStatus,
    parse_notification,
)
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender
from sglang.srt.disaggregation.pd import nixl_transfers
from sglang.srt.disaggregation.pd.early_connections import Connection
from sglang.srt.disaggregation.pd.nixl_transfers import Transfer
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket

from pd_harness.polling import own_time, wait_until
from pd_harness.ports import free_ports

pytestmark = pytest.mark.engine

ROOM, STOPPED, LIVE = 7, "stopped", "live"
SILENT = {STOPPED: "decode 10.0.0.1:1 has not answered for 10 s"}


class FakeNixlAgent:
    """Replaces NIXL's agent: has each handle's state or error, and cannot release some handles."""

    def __init__(self):
        self.states, self.released, self.keeps = {}, [], set()
        self.added, self.removed = [], []

    def check_xfer_state(self, handle) -> str:
        state = self.states.get(handle, "PROC")
        if isinstance(state, Exception):
            raise state
        return state

    def release_xfer_handle(self, handle) -> None:
        if handle in self.keeps:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.released.append(handle)

    def add_remote_agent(self, metadata: bytes) -> None:
        self.added.append(metadata)

    def remove_remote_agent(self, name: str) -> None:
        self.removed.append(name)


class FakeTransferInfo(SimpleNamespace):
    is_notified = is_delayed = False

    def is_dummy(self) -> bool:
        return False


@pytest.fixture
def manager(make_prefill):
    """A prefill rank's manager with a room that two decode ranks have requested."""
    manager = make_prefill(NixlKVManager, agent=FakeNixlAgent(), notified=[])
    manager.request_status[ROOM] = KVPoll.WaitingForInput
    manager.transfer_infos[ROOM] = {STOPPED: FakeTransferInfo(), LIVE: FakeTransferInfo()}
    manager._notify = lambda peer, notification: manager.notified.append(peer)
    return manager


def make_sender(manager) -> NixlKVSender:
    return NixlKVSender(manager, "", ROOM, [0], 0)


def sender_with_running_writes(manager) -> NixlKVSender:
    """A sender with a running write to each decode rank."""
    sender = make_sender(manager)
    manager.update_status(ROOM, KVPoll.WaitingForInput)
    sender.has_sent = True
    sender.xfer_handles = [Transfer(ROOM, peer, f"to {peer}") for peer in (STOPPED, LIVE)]
    manager.transfers.update(sender.xfer_handles)
    return sender


def failure_of(sender) -> str:
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(RuntimeError) as raised:
        sender.failure_exception()
    return str(raised.value)


def test_request_does_not_wait_for_silent_rank(manager):
    """Prefill notifies the rank when its writes have settled.

    The rank may come back, and would reuse its pages while they are written to.
    """
    sender = sender_with_running_writes(manager)
    assert sender.poll() == KVPoll.Transferring
    manager.agent.states[f"to {LIVE}"] = "DONE"
    assert sender.poll() == KVPoll.Transferring
    manager.silent_peers = dict(SILENT)
    assert failure_of(sender) == f"Prefill's write to decode failed: {SILENT[STOPPED]}"
    assert manager.notified == [LIVE]
    for _ in range(2):
        manager.check_peers()
        assert manager.notified == [LIVE] and len(manager.abandoned_transfers) == 1
    manager.agent.states[f"to {STOPPED}"] = "ERR"
    manager.check_peers()
    assert manager.notified == [LIVE, STOPPED]
    assert not manager.abandoned_transfers and not manager.pending_notices and not manager.transfers
    manager.check_peers()
    assert manager.notified == [LIVE, STOPPED]


def test_earlier_chunks_are_looked_at_before_the_next_is_sent(manager):
    """Nothing polls before the last one is sent; metrics would count the time until then."""
    sender, chunks = make_sender(manager), []
    manager.update_status(ROOM, KVPoll.WaitingForInput)
    manager.add_transfer_request = lambda *chunk: chunks.append(chunk) or []
    sender.num_kv_indices = 3
    sender.xfer_handles = [Transfer(ROOM, LIVE, number) for number in ("first", "second")]
    manager.agent.states["first"] = "DONE"
    sender.send(np.array([1], np.int32))
    assert [write.handle for write in sender.xfer_handles] == ["second"] and len(chunks) == 1
    manager.agent.states["second"] = "ERR"
    sender.send(np.array([2], np.int32))
    assert len(chunks) == 1 and manager.check_status(ROOM) == KVPoll.Failed


def test_write_abandoned_during_a_check_is_not_lost(manager):
    """Otherwise prefill would notify decode, which would free its pages during the write."""
    first, second = (Transfer(ROOM, STOPPED, handle) for handle in ("first", "second"))
    manager.abandoned_transfers = [first]
    leaving, looking = threading.Event(), threading.Event()

    class Silent(dict):
        def get(self, *peer) -> str:
            leaving.set()
            looking.wait(0.5)
            return super().get(*peer)

    def look(handle) -> str:
        if handle == "first":
            looking.set()
            time.sleep(0.2)  # the other thread goes on
        return "PROC"

    manager.silent_peers = Silent(SILENT)
    manager.agent.check_xfer_state = look
    sender = threading.Thread(target=manager.is_settled, args=(second,))
    sender.start()
    assert leaving.wait(5)
    manager.check_peers()
    sender.join()
    assert {write.handle for write in manager.abandoned_transfers} == {"first", "second"}


def test_request_waits_for_its_other_ranks_if_one_is_silent(manager):
    sender = sender_with_running_writes(manager)
    manager.silent_peers = dict(SILENT)
    assert sender.poll() == KVPoll.Transferring
    manager.agent.states[f"to {LIVE}"] = "DONE"
    failure_of(sender)


@pytest.fixture
def unreadable(manager) -> Transfer:
    """A write whose state NIXL cannot read."""
    manager.agent.states["it"] = RuntimeError("NIXL_ERR_BACKEND")
    return Transfer(ROOM, LIVE, "it")


def test_unreadable_write_is_finished_if_nixl_releases_it(manager, unreadable):
    assert manager.has_finished(unreadable)
    assert unreadable.outcome == "NIXL_ERR_BACKEND" and manager.agent.released == ["it"]


def test_unreadable_write_that_nixl_keeps_finishes_after_a_timeout(
    manager, unreadable, monkeypatch
):
    manager.agent.keeps.add("it")
    assert not manager.has_finished(unreadable)
    monkeypatch.setattr(nixl_transfers, "UNREADABLE_SECONDS", 0.0)
    assert manager.has_finished(unreadable) and unreadable.outcome == "NIXL_ERR_BACKEND"


def test_write_that_is_readable_again_keeps_its_outcome(manager, unreadable):
    manager.agent.keeps.add("it")
    assert not manager.has_finished(unreadable)
    manager.agent.states["it"] = "DONE"
    assert manager.has_finished(unreadable) and unreadable.outcome == ""


def test_open_room_of_silent_rank_fails(manager):
    sender = make_sender(manager)
    manager.fail_room_of_silent_peer(ROOM, SILENT[STOPPED])
    assert failure_of(sender) == SILENT[STOPPED]
    assert sorted(manager.notified) == [LIVE, STOPPED]
    manager.fail_room_of_silent_peer(ROOM, SILENT[STOPPED])  # it has already failed
    assert len(manager.notified) == 2


def test_refused_request_fails_for_waiting_and_later_decode_ranks(manager):
    manager.request_status.clear()
    manager.refuse(ROOM, "too long")
    assert sorted(manager.notified) == [LIVE, STOPPED]
    assert manager.failed_rooms[ROOM].reason == "too long"
    assert not manager.request_status and not manager.transfer_infos


def test_refusal_does_not_affect_an_open_request_of_that_room(manager):
    sender = make_sender(manager)
    manager.refuse(ROOM, "too long")
    assert not manager.notified and sender.poll() != KVPoll.Failed


class FakeRegistration(SimpleNamespace):
    """A registration that NIXL has accepted; `name` is the decode rank's."""

    refusal, plan, is_connected = "", object(), True
    can_retry, retry_at = False, 1e9


def test_rank_with_a_running_write_is_not_released(manager):
    sender = sender_with_running_writes(manager)
    info = manager.decode_kv_args_table[STOPPED] = FakeRegistration(name=STOPPED)
    assert not manager.release_peer(STOPPED)
    assert info.is_connected and not manager.agent.removed and sender.xfer_handles
    manager.agent.states[f"to {STOPPED}"] = "ERR"
    manager.unreachable_peers.add(STOPPED)
    assert manager.release_peer(STOPPED)
    assert manager.agent.removed == [STOPPED] and not manager.unreachable_peers
    assert (info.plan, info.is_connected, info.can_retry) == (None, False, True)


def test_rank_that_nixl_reads_is_not_released(manager):
    info = manager.decode_kv_args_table[LIVE] = FakeRegistration(name=LIVE)
    manager.connecting[LIVE] = Connection(LIVE, "handle", 0.0, next_read_at=None)
    assert not manager.release_peer(LIVE) and not manager.agent.removed
    assert info.is_connected and not info.can_retry


def test_room_without_a_request_fails_during_a_write_of_an_earlier_one(manager):
    """No sender will notify its decode ranks; those that are not being written to are at once."""
    manager.request_status.pop(ROOM)
    manager.abandoned_transfers = [Transfer(ROOM, STOPPED, "earlier", abandon_reason="silent")]
    manager.transfers.update(manager.abandoned_transfers)
    manager.abort_room(ROOM, "refused")
    assert manager.notified == [LIVE] and not manager.transfer_infos
    manager.agent.states["earlier"] = "ERR"
    manager.check_peers()
    assert manager.notified == [LIVE, STOPPED]


def test_dropped_rank_is_not_reconnected(manager):
    assert not manager._reconnect(LIVE) and not manager.agent.removed


def test_reconnected_rank_is_not_registered_again(manager, connected):
    info = manager.decode_kv_args_table[LIVE]
    info.is_connected, info.can_retry = False, True
    assert manager._reconnect(LIVE)
    assert (info.is_connected, info.can_retry) == (True, False)


def test_released_rank_is_registered_again_by_its_metadata(manager):
    """The rank was cut off for long, but its process runs on, so it does not register again."""
    info = manager.decode_kv_args_table[LIVE] = FakeRegistration(name=LIVE)
    done, manager.note_peer_alive = [], lambda name, info: done.append(("note_peer_alive", name))
    manager._register_decode = lambda info: done.append(("registered", info.name))
    request = SimpleNamespace(name=LIVE, room=9, required_dst_info_num=1, dst_aux_index=0)
    request.dst_kv_indices = request.dst_state_indices = np.arange(2)
    manager._registration_of(request)
    assert done == [("note_peer_alive", LIVE)]
    manager.release_peer(LIVE)
    manager._registration_of(request)
    assert done[1:] == [("note_peer_alive", LIVE), ("registered", LIVE)] and info.retry_at > 0


def test_refused_rank_is_not_registered_again(manager):
    info = manager.decode_kv_args_table[LIVE] = FakeRegistration(
        name=LIVE, refusal="page sizes differ"
    )
    assert manager.release_peer(LIVE) and not info.can_retry


@pytest.mark.parametrize("refusal", ["", "other page sizes"])
def test_registering_decode_rank_is_connected_once(manager, refusal):
    asked = []
    manager.connect_early = lambda *peer: asked.append(peer)
    info = FakeTransferInfo(
        agent_name=LIVE, agent_metadata=b"its", dst_aux_ptrs=[1, 2], refusal=refusal
    )
    for _ in range(2):
        manager._add_remote_peer(info)
    assert manager.agent.added == [b"its"]
    assert asked == ([] if refusal else [(LIVE, [1, 2])])


def register_live_rank(manager, port: int) -> None:
    """Registers the live decode rank, which reads messages at this port."""
    info = FakeTransferInfo(endpoint="127.0.0.1", dst_port=port, agent_metadata=b"its")
    manager.decode_kv_args_table = {LIVE: info}


def test_no_reconnect_while_an_early_connection_is_pending(manager):
    """NIXL would drop memory that it is reading."""
    register_live_rank(manager, 1)  # nothing listens there
    manager.connecting[LIVE] = reading = Connection(LIVE, "handle", 0.0, next_read_at=None)
    assert not manager._reconnect(LIVE) and not manager.agent.removed
    reading.next_read_at = time.monotonic() + 60
    assert not manager._reconnect(LIVE) and manager.agent.removed == [LIVE]


@pytest.fixture
def connected(manager, listen):
    """The socket on which the live rank reads messages, and a connected one to it."""
    reader, port = listen()
    register_live_rank(manager, port)
    peer = PeerSocket.to("127.0.0.1", port)
    peer.open()
    assert wait_until(lambda: peer.silent_for() == 0, 5)
    return reader, peer


def test_live_decode_rank_is_reconnected(manager, connected):
    for _ in range(2):
        assert manager._reconnect(LIVE) and not manager.unreachable_peers
    assert manager.agent.added == [b"its", b"its"]


def test_just_lost_rank_is_reconnected_once(manager, connected, monkeypatch):
    """Only the network may have failed, as the rank has requested a room."""
    monkeypatch.setattr(PeerSocket, "lost_for", lambda self: 0.1)
    assert manager._reconnect(LIVE)
    assert not manager._reconnect(LIVE)
    manager.handle_peer_recovered(LIVE)
    assert manager._reconnect(LIVE)
    assert len(manager.agent.added) == 2


@pytest.mark.parametrize("was_connected", [True, False])
def test_rank_whose_process_is_gone_is_not_reconnected(manager, connected, was_connected):
    """UCX keeps a socket for each refused connection, and may abort this process."""
    if was_connected:
        reader, peer = connected
        reader.close(linger=0)
        assert wait_until(lambda: not peer.is_listening(), 5)
    else:
        (port,) = free_ports(1)
        register_live_rank(manager, port)
        PeerSocket.to("127.0.0.1", port).open()
    for _ in range(3):
        assert not manager._reconnect(LIVE)
    assert not manager.agent.added and manager.unreachable_peers == {LIVE}


def test_reconnect_does_not_block_the_scheduler(manager, unresponsive_port):
    """The rank listens but accepts no connection: its host is overloaded, or packets are lost."""
    register_live_rank(manager, unresponsive_port)
    started_at = own_time()
    assert not manager._reconnect(LIVE)
    assert own_time() - started_at < 0.1
    assert manager.unreachable_peers == {LIVE}


def test_duplicate_room_does_not_end_a_request_with_a_running_write(manager):
    """Decode would free pages that are being written to."""
    first = sender_with_running_writes(manager)
    manager.agent.states[f"to {LIVE}"] = "DONE"
    second = make_sender(manager)
    failure_of(second)
    assert manager.notified == [LIVE] and first.poll() == KVPoll.Transferring
    manager.check_peers()
    assert manager.notified == [LIVE]
    manager.agent.states[f"to {STOPPED}"] = "DONE"
    manager.check_peers()
    assert manager.notified == [LIVE, STOPPED]
    failure_of(first)
    assert manager.notified == [LIVE, STOPPED]


def test_unreachable_rank_is_notified_later(manager):
    """Once, as the room may be another request's then; not while the rank is unreachable."""
    reached, lost = [], {LIVE}

    def notify(peer: str, notification: bytes) -> None:
        if peer in lost:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        reached.append(peer)

    manager._notify = notify
    manager.fail(ROOM, "it failed")
    manager.close_failed_room(ROOM)
    assert reached == [STOPPED]
    manager.check_peers()
    assert reached == [STOPPED]
    lost.clear()
    manager.unreachable_peers.add(LIVE)
    manager.check_peers()
    assert reached == [STOPPED]
    manager.unreachable_peers.clear()
    for _ in range(2):
        manager.check_peers()
        assert reached == [STOPPED, LIVE] and not manager.pending_notices


@pytest.mark.parametrize("what", ["dropped", "sends metadata"])
def test_rank_is_not_notified_of_an_old_room(manager, what):
    manager.pending_notices = [
        (ROOM, LIVE, FakeTransferInfo(), "it failed"),
        (8, STOPPED, FakeTransferInfo(), "it failed"),
    ]
    if what == "dropped":
        manager.drop_peer(LIVE)
    else:
        with pytest.raises(LayoutError, match="is not registered"):
            manager._open_room(FakeTransferInfo(room=ROOM, name=LIVE))
    manager.check_peers()
    assert manager.notified == [STOPPED]


def test_failed_room_does_not_succeed_on_a_rank_that_comes_back(manager):
    """Prefill has freed the pages; NIXL notifies decode of a write's end when prefill polls it."""
    sender = sender_with_running_writes(manager)
    manager.agent.states[f"to {LIVE}"] = "DONE"
    manager.silent_peers = dict(SILENT)
    failure_of(sender)
    decode, is_done = TransferStatus(1), []

    def ask_state(handle) -> str:
        for done in (Notification(ROOM, "kv", is_last=True), Notification(ROOM, "aux")):
            decode.add(STOPPED, done)
        is_done.append(decode.is_done())
        return "DONE"

    manager.agent.check_xfer_state = ask_state
    manager.agent.send_notif = lambda peer, note: decode.add(peer, parse_notification(note))
    manager.check_peers()
    assert is_done == [False] and manager.notified == [LIVE, STOPPED]
    decode.add(STOPPED, Notification(ROOM, "failed"))
    assert decode.is_failed()


def sender_with_rejected_write(manager, error: Exception | None) -> NixlKVSender:
    """A sender whose write to the live rank was rejected by NIXL."""

    def transfer(handle) -> str:
        if error is not None:
            raise error
        return "ERR"

    sender = make_sender(manager)
    manager.update_status(ROOM, KVPoll.WaitingForInput)
    manager.agent.initialize_xfer = lambda *_: "it"
    manager.agent.transfer = transfer
    manager.unreachable_peers.add(LIVE)
    with pytest.raises(RuntimeError, match="NIXL"):
        manager._start(LIVE, ROOM, None, None, manager._notification(ROOM, "kv"))
    manager.unreachable_peers.clear()
    manager.fail(ROOM, "it could not be sent")
    failure_of(sender)
    return sender


@pytest.mark.parametrize("error", [None, RuntimeError("NIXL_ERR_BACKEND")])
def test_rejected_write_may_be_partly_posted(manager, monkeypatch, error):
    sender_with_rejected_write(manager, error)
    for _ in range(2):
        assert manager.notified == [STOPPED]
        manager.check_peers()
    monkeypatch.setattr(nixl_transfers, "UNREADABLE_SECONDS", 0.0)
    manager.check_peers()
    assert manager.notified == [STOPPED, LIVE]
    assert not manager.abandoned_transfers and not manager.transfers


def test_rejected_write_over_a_lost_connection_has_settled(manager):
    sender_with_rejected_write(manager, RuntimeError("NIXL_ERR_REMOTE_DISCONNECT"))
    assert sorted(manager.notified) == [LIVE, STOPPED]


def test_rejected_write_does_not_leave_its_rank_unreachable(manager, connected):
    sender_with_rejected_write(manager, None)
    assert manager._reconnect(LIVE)
