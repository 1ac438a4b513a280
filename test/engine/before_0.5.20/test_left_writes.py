"""NIXL: writes to a decode rank that is silent, and those of which the state cannot be read."""

import socket
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.kv_layout import (
    LayoutError,
    Notification,
    TransferStatus,
    parse_notification,
)
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender
from sglang.srt.disaggregation.pd import peer_sockets, writes
from sglang.srt.disaggregation.pd.writes import Write
from sglang.srt.disaggregation.utils import DisaggregationMode

from pd_harness.ports import free_ports
from pd_harness.waiting import awaited, own_time

pytestmark = pytest.mark.engine

ROOM, STOPPED, LIVE = 7, "stopped", "live"
SILENT = {STOPPED: "decode 10.0.0.1:1 has not answered for 10 s"}


class Agent:
    """NIXL's: the state of each handle, which may be an error, and which handles it gives up."""

    def __init__(self):
        self.states, self.released, self.keeps = {}, [], set()

    def check_xfer_state(self, handle) -> str:
        state = self.states.get(handle, "PROC")
        if isinstance(state, Exception):
            raise state
        return state

    def release_xfer_handle(self, handle) -> None:
        if handle in self.keeps:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.released.append(handle)


class Info(SimpleNamespace):
    def is_dummy(self) -> bool:
        return False


@pytest.fixture
def manager():
    """Prefill's, with a room that two decode ranks have asked for."""
    manager = NixlKVManager.__new__(NixlKVManager)
    manager.__dict__.update(
        agent=Agent(),
        disaggregation_mode=DisaggregationMode.PREFILL,
        request_status={ROOM: KVPoll.WaitingForInput},
        transfer_infos={ROOM: {STOPPED: Info(), LIVE: Info()}},
        decode_kv_args_table={},
        bootstrap_timeout=100,
        **{"attn_tp_rank": 0, "pp_rank": 0, "pp_size": 1},
    )
    manager.told = []
    manager._notify = lambda peer, notification: manager.told.append(peer)
    return manager


def begun(manager) -> NixlKVSender:
    """A sender of which a write to each decode rank is under way."""
    sender = NixlKVSender(manager, "", ROOM, [0], 0)
    manager.update_status(ROOM, KVPoll.WaitingForInput)
    sender.has_sent = True
    sender.xfer_handles = [Write(ROOM, peer, f"to {peer}") for peer in (STOPPED, LIVE)]
    manager.writes.update(sender.xfer_handles)
    return sender


def end(sender) -> str:
    assert sender.poll() == KVPoll.Failed
    with pytest.raises(RuntimeError) as raised:
        sender.failure_exception()
    return str(raised.value)


def test_a_request_does_not_wait_for_a_silent_rank(manager):
    sender = begun(manager)
    assert sender.poll() == KVPoll.Transferring
    manager.agent.states[f"to {LIVE}"] = "DONE"
    assert sender.poll() == KVPoll.Transferring
    manager.silent = dict(SILENT)
    assert end(sender) == f"Prefill's write to decode failed: {SILENT[STOPPED]}"
    assert manager.told == [LIVE]


def test_the_silent_rank_is_told_when_nothing_is_written_any_more(manager):
    """It may come back, and would give its pages to others under the write."""
    sender = begun(manager)
    manager.agent.states[f"to {LIVE}"] = "DONE"
    manager.silent = dict(SILENT)
    end(sender)
    for _ in range(2):
        manager.look_at_peers()
        assert manager.told == [LIVE] and len(manager.left_writes) == 1
    manager.agent.states[f"to {STOPPED}"] = "ERR"
    manager.look_at_peers()
    assert manager.told == [LIVE, STOPPED]
    assert not manager.left_writes and not manager.untold and not manager.writes
    manager.look_at_peers()
    assert manager.told == [LIVE, STOPPED]


def test_a_write_that_is_left_while_others_are_looked_at_is_not_forgotten(manager):
    """Else decode would be told, and would free its pages, under it."""
    first, second = (Write(ROOM, STOPPED, handle) for handle in ("first", "second"))
    manager.left_writes = [first]
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

    manager.silent = Silent(SILENT)
    manager.agent.check_xfer_state = look
    sender = threading.Thread(target=manager.is_over, args=(second,))
    sender.start()
    assert leaving.wait(5)
    manager.look_at_peers()
    sender.join()
    assert {write.handle for write in manager.left_writes} == {"first", "second"}


def test_a_request_waits_for_its_other_ranks(manager):
    sender = begun(manager)
    manager.silent = dict(SILENT)
    assert sender.poll() == KVPoll.Transferring
    manager.agent.states[f"to {LIVE}"] = "DONE"
    end(sender)


def test_a_write_whose_state_cannot_be_read_is_over_if_nixl_gives_it_up(manager):
    write = Write(ROOM, LIVE, "it")
    manager.agent.states["it"] = RuntimeError("NIXL_ERR_BACKEND")
    assert manager.has_ended(write)
    assert write.end == "NIXL_ERR_BACKEND" and manager.agent.released == ["it"]


def test_else_it_may_go_on_for_a_while(manager, monkeypatch):
    write = Write(ROOM, LIVE, "it")
    manager.agent.states["it"] = RuntimeError("NIXL_ERR_BACKEND")
    manager.agent.keeps.add("it")
    assert not manager.has_ended(write)
    monkeypatch.setattr(writes, "UNREAD_SECONDS", 0.0)
    assert manager.has_ended(write) and write.end == "NIXL_ERR_BACKEND"


def test_one_that_can_be_read_again_ends_as_it_does(manager):
    write = Write(ROOM, LIVE, "it")
    manager.agent.states["it"] = RuntimeError("NIXL_ERR_BACKEND")
    manager.agent.keeps.add("it")
    assert not manager.has_ended(write)
    manager.agent.states["it"] = "DONE"
    assert manager.has_ended(write) and write.end == ""


def test_an_open_room_of_a_silent_rank_fails(manager):
    manager.senders.clear()
    sender = NixlKVSender(manager, "", ROOM, [0], 0)
    manager.fail_silent(ROOM, SILENT[STOPPED])
    assert end(sender) == SILENT[STOPPED]
    assert sorted(manager.told) == [LIVE, STOPPED]
    manager.fail_silent(ROOM, SILENT[STOPPED])  # it is over
    assert len(manager.told) == 2


def test_a_refused_request_fails_for_who_has_asked_and_for_who_asks_later(manager):
    manager.request_status.clear()
    manager.refuse(ROOM, "too long")
    assert sorted(manager.told) == [LIVE, STOPPED]
    assert manager.aborted[ROOM].reason == "too long"
    assert not manager.request_status and not manager.transfer_infos


def test_a_refusal_does_not_touch_another_request_of_that_number(manager):
    sender = NixlKVSender(manager, "", ROOM, [0], 0)
    manager.refuse(ROOM, "too long")
    assert not manager.told and sender.poll() != KVPoll.Failed


class Registered(SimpleNamespace):
    """A registration that NIXL has taken; `name` is the decode rank's."""

    refusal, plan, is_connected = "", object(), True
    try_again, not_before = False, 1e9


def test_a_rank_that_is_written_to_does_not_rest(manager):
    sender = begun(manager)
    manager.agent.peers = {STOPPED, LIVE}
    manager.agent.remove_remote_agent = manager.agent.peers.remove
    info = manager.decode_kv_args_table[STOPPED] = Registered(name=STOPPED)
    assert not manager.rest(STOPPED)
    assert info.is_connected and manager.agent.peers == {STOPPED, LIVE} and sender.xfer_handles
    manager.agent.states[f"to {STOPPED}"] = "ERR"
    manager.out_of_reach.add(STOPPED)
    assert manager.rest(STOPPED)
    assert manager.agent.peers == {LIVE} and not manager.out_of_reach
    assert (info.plan, info.is_connected, info.try_again) == (None, False, True)


def test_a_rank_that_rests_is_registered_again_when_it_asks(manager):
    """It was cut off for long, has its process still, and so does not register."""
    manager.agent.remove_remote_agent = lambda name: None
    info = manager.decode_kv_args_table[LIVE] = Registered(name=LIVE)
    done, manager.heard = [], lambda name, info: done.append(("heard", name))
    manager._register_decode = lambda info: done.append(("registered", info.name))
    asks = SimpleNamespace(room=9, required_dst_info_num=1, dst_aux_index=0)
    asks.dst_kv_indices = asks.dst_state_indices = np.arange(2)
    manager._asking_peer(asks, LIVE)
    assert done == [("heard", LIVE)]
    manager.rest(LIVE)
    manager._asking_peer(asks, LIVE)
    assert done[1:] == [("heard", LIVE), ("registered", LIVE)] and info.not_before > 0


def test_a_refused_rank_is_not_registered_again(manager):
    manager.agent.remove_remote_agent = lambda name: None
    info = manager.decode_kv_args_table[LIVE] = Registered(name=LIVE, refusal="page sizes differ")
    assert manager.rest(LIVE) and not info.try_again


@pytest.mark.parametrize("refusal", ["", "other page sizes"])
def test_a_decode_rank_that_registers_is_connected_to_once(manager, refusal):
    told, asked = [], []
    manager.agent.add_remote_agent = told.append
    manager.connect_early = lambda *peer: asked.append(peer)
    info = Info(agent_name=LIVE, agent_metadata=b"its", dst_aux_ptrs=[1, 2], refusal=refusal)
    for _ in range(2):
        manager._add_remote_peer(info)
    assert told == [b"its"] and asked == ([] if refusal else [(LIVE, [1, 2])])


def test_a_decode_rank_that_is_being_read_gets_no_other_connection(manager):
    """NIXL would forget memory that it is reading."""
    dropped = []
    manager.agent.remove_remote_agent = dropped.append
    manager.decode_kv_args_table = {LIVE: Info(endpoint="127.0.0.1", dst_port=1)}
    manager.connecting.add(LIVE)
    assert not manager._connect_again(LIVE) and not dropped
    manager.connecting.clear()
    assert not manager._connect_again(LIVE) and dropped == [LIVE]  # nobody listens there


@pytest.fixture
def connected(manager):
    """The port on which the live rank reads messages, to which there is a connection."""
    manager.agent.remove_remote_agent = lambda name: None
    manager.added, manager.agent.add_remote_agent = [], lambda data: manager.added.append(data)
    reader = zmq.Context.instance().socket(zmq.PULL)
    reader.setsockopt(zmq.LINGER, 0)
    port = reader.bind_to_random_port("tcp://127.0.0.1")
    place = {"endpoint": "127.0.0.1", "dst_port": port, "agent_metadata": b"its"}
    manager.decode_kv_args_table = {LIVE: Info(**place)}
    peer = peer_sockets.PeerSocket.to("127.0.0.1", port)
    peer.open()
    assert awaited(lambda: peer.silent_for() == 0, 5)
    yield SimpleNamespace(peer=peer, reader=reader)
    reader.close()


def test_a_decode_rank_that_lives_gets_a_new_connection(manager, connected):
    for _ in range(2):
        assert manager._connect_again(LIVE) and not manager.out_of_reach
    assert manager.added == [b"its", b"its"]


def test_one_that_is_just_lost_is_tried_once(manager, connected):
    """It may be the network alone, and has asked for a room."""
    connected.reader.close()
    assert awaited(connected.peer.lost_for, 5)
    assert manager._connect_again(LIVE)
    assert not manager._connect_again(LIVE)
    manager.is_back(LIVE)
    assert manager._connect_again(LIVE)
    assert len(manager.added) == 2


def test_one_that_died_as_soon_as_it_had_registered_is_tried_once(manager):
    """There never was a connection to it, and each of its rooms would cost a socket of UCX."""
    manager.agent.remove_remote_agent = lambda name: None
    added, manager.agent.add_remote_agent = [], lambda data: added.append(data)
    (port,) = free_ports(1)
    place = {"endpoint": "127.0.0.1", "dst_port": port, "agent_metadata": b"its"}
    manager.decode_kv_args_table = {LIVE: Info(**place)}
    peer_sockets.PeerSocket.to("127.0.0.1", port).open()
    for _ in range(3):
        manager._connect_again(LIVE)
    assert added == [b"its"] and manager.out_of_reach == {LIVE}


def test_the_scheduler_does_not_wait_for_one_that_does_not_answer(manager):
    """It listens, and takes no connection: its machine is overloaded, or packets vanish."""
    manager.agent.remove_remote_agent = lambda name: None
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as waiting:
        _, port = listener.getsockname()
        with pytest.raises(TimeoutError):
            for _ in range(10):
                waiting.enter_context(socket.create_connection(("127.0.0.1", port), 0.2))
        manager.decode_kv_args_table = {LIVE: Info(endpoint="127.0.0.1", dst_port=port)}
        begun = own_time()
        assert not manager._connect_again(LIVE)
        assert own_time() - begun < 0.1
    assert manager.out_of_reach == {LIVE}


def test_another_request_of_that_number_does_not_end_it_under_its_write(manager):
    """Decode would free pages that are being written to."""
    first = begun(manager)
    manager.agent.states[f"to {LIVE}"] = "DONE"
    second = NixlKVSender(manager, "", ROOM, [0], 0)
    end(second)
    assert manager.told == [LIVE] and first.poll() == KVPoll.Transferring
    manager.look_at_peers()
    assert manager.told == [LIVE]
    manager.agent.states[f"to {STOPPED}"] = "DONE"
    manager.look_at_peers()
    assert manager.told == [LIVE, STOPPED]
    end(first)
    assert manager.told == [LIVE, STOPPED]


def test_a_rank_that_could_not_be_told_is_told_later(manager):
    """Once: the number may be another request's then. Not while nothing is sent to it."""
    reached, lost = [], {LIVE}

    def notify(peer: str, notification: bytes) -> None:
        if peer in lost:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        reached.append(peer)

    manager._notify = notify
    manager.fail(ROOM, "it failed")
    manager.finish_failed(ROOM)
    assert reached == [STOPPED]
    manager.look_at_peers()
    assert reached == [STOPPED]
    lost.clear()
    manager.out_of_reach.add(LIVE)
    manager.look_at_peers()
    assert reached == [STOPPED]
    manager.out_of_reach.clear()
    for _ in range(2):
        manager.look_at_peers()
        assert reached == [STOPPED, LIVE] and not manager.untold


@pytest.mark.parametrize("what", ["forgotten", "asks again"])
def test_a_rank_is_not_told_of_an_old_room(manager, what):
    manager.agent.remove_remote_agent = lambda name: None
    manager.untold = [(ROOM, LIVE, Info(), "it failed"), (8, STOPPED, Info(), "it failed")]
    if what == "forgotten":
        manager.drop(LIVE)
    else:
        with pytest.raises(LayoutError, match="is not registered"):
            manager._open_room(Info(room=ROOM, agent_name=LIVE))
    manager.look_at_peers()
    assert manager.told == [STOPPED]


def test_a_room_that_failed_is_no_success_on_a_rank_that_comes_back(manager):
    """Prefill has freed the pages that were sent; NIXL tells of a write's end when it is asked."""
    sender = begun(manager)
    manager.agent.states[f"to {LIVE}"] = "DONE"
    manager.silent = dict(SILENT)
    end(sender)
    decode, is_done = TransferStatus(1), []

    def ask_state(handle) -> str:
        for done in (Notification(ROOM, "kv", is_last=True), Notification(ROOM, "aux")):
            decode.add(STOPPED, done)
        is_done.append(decode.is_done())
        return "DONE"

    manager.agent.check_xfer_state = ask_state
    manager.agent.send_notif = lambda peer, note: decode.add(peer, parse_notification(note))
    manager.look_at_peers()
    assert is_done == [False] and manager.told == [LIVE, STOPPED]
    decode.add(STOPPED, Notification(ROOM, "failed"))
    assert decode.is_failed()


def rejecting(manager, error: Exception | None) -> NixlKVSender:
    """A sender of which NIXL does not start a write to the live rank."""

    def transfer(handle) -> str:
        if error is not None:
            raise error
        return "ERR"

    sender = NixlKVSender(manager, "", ROOM, [0], 0)
    manager.update_status(ROOM, KVPoll.WaitingForInput)
    manager.agent.initialize_xfer = lambda *_: "it"
    manager.agent.transfer = transfer
    manager.out_of_reach.add(LIVE)
    with pytest.raises(RuntimeError, match="NIXL"):
        manager._start(LIVE, None, None, manager._notification(ROOM, "kv"))
    manager.out_of_reach.clear()
    manager.fail(ROOM, "it could not be sent")
    end(sender)
    return sender


@pytest.mark.parametrize("error", [None, RuntimeError("NIXL_ERR_BACKEND")])
def test_a_write_that_is_not_started_may_be_posted_in_part(manager, monkeypatch, error):
    rejecting(manager, error)
    for _ in range(2):
        assert manager.told == [STOPPED]
        manager.look_at_peers()
    monkeypatch.setattr(writes, "UNREAD_SECONDS", 0.0)
    manager.look_at_peers()
    assert manager.told == [STOPPED, LIVE] and not manager.left_writes and not manager.writes


def test_nothing_arrives_over_a_connection_that_is_lost(manager):
    rejecting(manager, RuntimeError("NIXL_ERR_REMOTE_DISCONNECT"))
    assert sorted(manager.told) == [LIVE, STOPPED]


def test_a_write_that_is_not_started_keeps_no_rank_out_of_reach(manager, connected):
    rejecting(manager, None)
    assert manager._connect_again(LIVE)
