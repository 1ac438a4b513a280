"""NIXL: a decode rank whose connection and memory were lost, until prefill reloads both."""

import threading
import time

import fake_managers
import numpy as np
import pytest
from engine_release import IS_0_5_18, not_0_5_18
from fake_managers import (
    BUFFER,
    NOTICE,
    PAGE_BYTES,
    mla_layout,
    register,
    registered_peer,
    send_metadata,
    send_nixl_pages,
    send_nixl_state,
)
from msgspec.structs import replace
from rank_faults import nixl_agent
from sglang.srt.disaggregation.kv_layout import Heads
from sglang.srt.disaggregation.nixl import conn as nixl
from sglang.srt.disaggregation.pd import message_checks, peer_silence, peer_sockets
from sglang.srt.disaggregation.pd.early_connections import Connection
from sglang.srt.disaggregation.pd.nixl_sends import METADATA_FRAME

from pd_harness.polling import wait_until
from pd_harness.ports import free_ports

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

described = pytest.mark.parametrize("is_described", [True, False])

ROOM, NAME = 7, fake_managers.PEER["nixl"]
PAGES = np.array([4, 5], np.int32), np.array([8, 9], np.int32)
SETTLE_LIMIT = "SETTLE_SECONDS" if IS_0_5_18 else "NIXL_ERR_SETTLE_TIMEOUT_S"


def writes(pages=PAGES, layers=range(4), size=PAGE_BYTES, start=0) -> list[tuple[int, int, int]]:
    """The writes of these pages, sorted: addresses on both sides, and bytes.

    Args:
        start: Distance of the first layer's buffer from that of KV.
    """
    own, peer = (base + start for base in fake_managers.BASE.values())
    return sorted(
        (own + layer * BUFFER + int(src) * size, peer + layer * BUFFER + int(dst) * size, size)
        for layer in layers
        for src, dst in zip(*pages)
    )


ALL = writes()


@pytest.fixture
def backend() -> str:
    return "nixl"


IS_LISTENING = peer_sockets.PeerSocket.is_listening


@pytest.fixture(autouse=True)
def is_listening(monkeypatch):
    """Whether the peer's process accepts connections."""
    answer = {"now": True}
    monkeypatch.setattr(peer_sockets.PeerSocket, "is_listening", lambda self: answer["now"])
    return answer


def prefill_with_peer(own=None, peer=None, **more):
    """A prefill rank that has read the registration of a decode rank."""
    prefill = fake_managers.prefill_rank("nixl", own, **more)
    register(prefill, fake_managers.decode_rank("nixl", peer))
    return prefill


@pytest.fixture
def connected(published):
    return prefill_with_peer()


def send(prefill):
    """Sends a chunk; returns its writes, sorted."""
    transfers = nixl_agent(prefill).transfers
    transfers.clear()
    handle = send_nixl_pages(prefill, *PAGES)
    assert (handle is None) == (not transfers)
    return sorted(transfers)


def reload_times(prefill) -> dict[str, float]:
    """When each peer was reloaded."""
    return prefill.reload_times if IS_0_5_18 else prefill._peer_reload_times


def reload_peers(prefill, *names: str) -> None:
    """Reloads decode ranks as after a failure in a room that they have requested."""
    if IS_0_5_18:
        prefill.reload_peers(set(names))
    else:
        prefill._reload_invalidated_peers(dict.fromkeys(names))


def reload_peer(prefill) -> None:
    """Reloads a decode rank as after a failure in one of its rooms, more than a second ago."""
    reload_times(prefill).clear()
    reload_peers(prefill, NAME)


def lose_and_reload_peer(prefill) -> None:
    """NIXL drops a peer's memory with its connection; another room's failure reloads it."""
    prefill.agent.peers.discard(NAME)
    reload_peer(prefill)


def record_removed_peers(prefill) -> list[str]:
    """Returns a list of the peers that will be removed from NIXL's agent."""
    agent, removed = nixl_agent(prefill), []
    remove = agent.remove_remote_agent
    agent.remove_remote_agent = lambda name: (removed.append(name), remove(name))
    return removed


def test_pages_are_written_before_and_after_a_reload(connected):
    assert send(connected) == ALL
    lose_and_reload_peer(connected)
    assert connected.agent.peers == {NAME}
    assert send(connected) == ALL


def test_chunk_raises_after_a_failed_reload(connected):
    """Otherwise prefill would notify decode that the chunk has arrived."""
    nixl_agent(connected).is_failing = True
    lose_and_reload_peer(connected)
    assert not connected.agent.peers
    with pytest.raises(RuntimeError, match="connection to decode peer was lost"):
        send(connected)
    nixl_agent(connected).is_failing = False
    lose_and_reload_peer(connected)
    assert send(connected) == ALL


@pytest.mark.parametrize("nixl_knows_it", [True, False])
def test_peer_whose_process_is_gone_is_not_added(connected, is_listening, nixl_knows_it):
    """UCX may abort prefill if the peer refuses the connection; stock adds it at once."""
    agent, added = nixl_agent(connected), []
    add = agent.add_remote_agent
    agent.add_remote_agent = lambda metadata: (added.append(metadata), add(metadata))[1]
    is_listening["now"] = False
    if nixl_knows_it:
        connected.connection.lost.add(NAME)
        reload_peer(connected)
    else:
        lose_and_reload_peer(connected)
    assert not added
    is_listening["now"] = True
    reload_peer(connected)
    assert len(added) == 1 and connected.agent.peers == {NAME}
    assert send(connected) == ALL


def test_peer_is_added_once_its_registered_port_listens(connected, listen, monkeypatch):
    monkeypatch.setattr(peer_sockets.PeerSocket, "is_listening", IS_LISTENING)
    info = registered_peer(connected)
    (info.dst_port,) = free_ports(1)
    lose_and_reload_peer(connected)
    assert not connected.agent.peers
    listen(info.dst_port)
    reload_peer(connected)
    assert connected.agent.peers == {NAME}
    assert send(connected) == ALL


@not_0_5_18("never adds a peer again")
def test_stock_adds_a_peer_whose_process_is_gone(is_listening):
    is_listening["now"] = False
    prefill = prefill_with_peer(kinds=fake_managers.ENGINES)
    lose_and_reload_peer(prefill)
    assert prefill.agent.peers == {NAME}


@not_0_5_18("never adds a peer again")
def test_stock_sends_to_an_unknown_peer_after_a_failed_reload():
    """Stock lists the chunk's pages for a peer that NIXL does not know; NIXL refuses them."""
    prefill = prefill_with_peer(kinds=fake_managers.ENGINES)
    nixl_agent(prefill).is_failing = True
    lose_and_reload_peer(prefill)
    assert NAME not in prefill.prep_handles
    assert [length for *_, length in send(prefill)] == [2 * PAGE_BYTES] * 4


def test_peer_is_reloaded_after_a_disconnect_error(connected, monkeypatch):
    """NIXL still knows the peer, so the engine alone would not reload it."""
    removed = record_removed_peers(connected)

    def refuse(_):
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    with monkeypatch.context() as disconnected:
        disconnected.setattr(nixl_agent(connected), "transfer", refuse)
        with pytest.raises(Exception, match="NIXL_ERR_REMOTE_DISCONNECT"):
            send(connected)
    reload_peers(connected, NAME)
    assert removed == [NAME] and connected.agent.peers == {NAME}
    assert send(connected) == ALL
    reload_peer(connected)
    assert removed == [NAME]


@described
def test_released_peer_is_reloaded_by_its_metadata(is_described):
    """The peer was cut off for long, but its process runs on, so it does not register again."""
    layout = mla_layout((64,) * 4)
    prefill = fake_managers.prefill_rank("nixl", layout)
    decode = fake_managers.decode_rank("nixl", layout)
    register(prefill, decode, is_described)
    plan = prefill.plan_for(NAME)
    for _ in range(2):
        assert prefill.release_peer(NAME)
        assert not prefill.prepared and not prefill.agent.peers and prefill.plan_for(NAME) is None
    send_metadata(prefill, decode, ROOM)
    assert prefill.agent.peers == {NAME} and prefill.plan_for(NAME).layout == plan.layout
    assert prefill._refusal_reason(ROOM, slice(0, 2)) == ""
    assert send(prefill) == ALL


def test_released_peer_may_register_again(connected, decode):
    connected.release_peer(NAME)
    register(connected, decode)
    assert send(connected) == ALL and not registered_peer(connected).refusal


def test_dropped_peer_leaves_no_entries(connected):
    connected.watched_peers[NAME] = registered_peer(connected)
    lose_and_reload_peer(connected)
    connected.release_peer(NAME)
    connected._drop_silent_peer(NAME)
    tables = ("decode_kv_args_table", "prepared", "watched_peers", "prep_handles")
    assert not any(getattr(connected, name) for name in tables) and not reload_times(connected)
    assert not connected.agent.peers


def test_worker_does_not_wait_for_silent_peer_of_a_cleared_room(connected, decode, monkeypatch):
    """The client leaves before its decode rank counts as silent; then the worker is free."""
    monkeypatch.setattr(nixl, SETTLE_LIMIT, 0.1)
    connected.watched_peers[NAME] = registered_peer(connected)
    nixl_agent(connected).check_xfer_state = lambda handle: "PROC"
    sender = fake_managers.new_sender(connected, ROOM)
    send_metadata(connected, decode, ROOM, pages=PAGES[1])
    fake_managers.add_chunk(connected, ROOM, PAGES[0])
    (queue,) = connected.transfer_queues
    threading.Thread(target=connected.transfer_worker, args=(queue,), daemon=True).start()
    assert wait_until(lambda: len(connected.agent.transfers) > len(ALL), 10, 0.01)
    sender.abort()
    assert not connected.transfer_infos and queue.busy_peers() == {NAME}
    monkeypatch.setattr(
        peer_sockets.PeerSocket, "silent_for", lambda self: peer_silence.RELEASE_AFTER_SECONDS
    )
    connected.replaced_peers.add(NAME)
    connected.check_peers()
    assert connected.prepared and NAME in connected.silent_peers  # while a write runs
    assert wait_until(lambda: not queue.busy_peers(), 10, 0.01)
    connected.check_peers()
    assert not (connected.prepared or connected.silent_peers or connected.decode_kv_args_table)
    assert not connected.failure_records


@described
def test_peer_with_more_pages_than_prefill_is_sent_all(is_described, prefill):
    own = mla_layout()
    peer = replace(own, kv=tuple(replace(buffer, pages=3 * buffer.pages) for buffer in own.kv))
    register(prefill, fake_managers.decode_rank("nixl", peer), is_described)
    last = np.array([3 * fake_managers.PAGES - 1], np.int32)
    send_nixl_pages(prefill, PAGES[0][:1], last)
    assert sorted(prefill.agent.transfers) == writes((PAGES[0][:1], last))


# Four prefill ranks hold two heads, each twice, and decode holds both.
REPLICAS = [fake_managers.mha_layout(Heads(0, 1, 2), (rank, 4)) for rank in (0, 1)]
BOTH_HEADS = fake_managers.mha_layout(Heads(0, 2, 2), (0, 1))


def test_rank_without_heads_for_a_peer_sends_nothing():
    prefill = prefill_with_peer(REPLICAS[1], BOTH_HEADS)
    assert registered_peer(prefill).plan is not None
    assert send(prefill) == []
    assert prefill.send_kvcache_slice(NAME, *PAGES, *NOTICE) is None
    lose_and_reload_peer(prefill)
    assert send(prefill) == []


def test_first_replica_sends_the_shared_head():
    prefill = prefill_with_peer(REPLICAS[0], BOTH_HEADS)
    assert len(send(prefill)) == 2 * 2 * len(PAGES[0]) * fake_managers.PAGE


def test_no_reload_within_the_cooldown(connected):
    """The engine reloads a peer at most once a second; a peer dropped sooner is unreachable."""
    lose_and_reload_peer(connected)
    connected.connection.lost.add(NAME)
    reload_peers(connected, NAME)
    assert connected.agent.peers == {NAME} and connected.connection.lost == {NAME}
    reload_peer(connected)
    assert connected.agent.peers == {NAME} and not connected.connection.lost
    assert send(connected) == ALL


@not_0_5_18("notes it where it calls NIXL")
@pytest.mark.parametrize("send", ["dcp", "mixed", "staged"])
def test_connection_lost_in_the_engines_own_send_is_noted(connected, monkeypatch, send):
    def lose(handle) -> None:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    method = f"send_kvcache_{send}"
    engine = fake_managers.ENGINES["nixl"]
    monkeypatch.setattr(engine, method, lambda self, peer: self._post_xfer("handle", "not posted"))
    connected.agent.transfer = lose
    connected.connection.peer = "the last one"
    with pytest.raises(RuntimeError):
        getattr(connected, method)(NAME)
    assert connected.connection.lost == {NAME}
    connected.connection.lost.clear()


def test_rank_that_nixl_reads_is_not_released(connected):
    removed = record_removed_peers(connected)
    connected.connecting[NAME] = Connection(NAME, "handle", 0.0, next_read_at=None)
    assert not connected.release_peer(NAME) and not removed
    assert send(connected) == ALL
    connected.connecting[NAME].next_read_at = time.monotonic() + 60
    assert connected.release_peer(NAME) and removed == [NAME]


def test_reload_keeps_other_peers_of_the_room(connected):
    register(connected, fake_managers.decode_rank("nixl", number=1))
    assert connected.agent.peers == {NAME, f"{NAME}1"}
    removed = record_removed_peers(connected)
    connected.connection.lost.add(NAME)
    reload_peers(connected, NAME, f"{NAME}1")
    assert removed == [NAME] and connected.agent.peers == {NAME, f"{NAME}1"}


def test_reload_survives_an_error_of_nixl(connected, monkeypatch):
    """Nothing catches what leaves it: the worker would end, and its decode ranks with it."""
    connected.connecting[NAME] = Connection(NAME, "handle", 0.0, next_read_at=None)
    lost = ReferenceError("agent")
    with monkeypatch.context() as broken:
        broken.setattr(connected, "end_early_connection", fail_with(lost))
        connected.connection.lost.add(NAME)
        reload_peers(connected, NAME)
    del connected.connecting[NAME]
    reload_times(connected).clear()
    reload_peers(connected, NAME)
    assert not connected.connection.lost and send(connected) == ALL


def fail_with(error: Exception):
    def fail(*_):
        raise error

    return fail


def test_lost_peer_is_reloaded_only_by_its_own_room(connected):
    connected.connection.lost.add(NAME)
    reload_peers(connected, "other")
    assert connected.connection.lost == {NAME}
    reload_peers(connected, NAME)
    assert not connected.connection.lost


@described
def test_state_is_sent_with_prepared_descriptor_lists(is_described):
    """For a peer that does not announce its number of pages, each request lists its pages."""
    layout = mla_layout(index_keys=(512, 0, 512, 512))
    prefill = fake_managers.prefill_rank("nixl", layout)
    register(prefill, fake_managers.decode_rank("nixl", layout), is_described)
    agent, listed = nixl_agent(prefill), []
    made = agent.make_prepped_xfer
    agent.make_prepped_xfer = lambda *given: (listed.append(given), made(*given))[1]
    pages = (4, 6), (8, 11)  # adjacent pages would be one copy
    handles = send_nixl_state(prefill, [list(pages[0])], [list(pages[1])])
    assert len(handles) == 1 and len(listed) == is_described
    written = writes(pages, layers=(0, 2, 3), size=512, start=fake_managers.STATE)
    assert sorted(prefill.agent.transfers) == written


def test_failing_registration_is_retried_every_ten_seconds(prefill, decode):
    """The rank's first request retries it at once; other ranks wait during each attempt."""
    tried = []

    def fail(metadata: bytes) -> None:
        tried.append(metadata)
        raise RuntimeError("NIXL_ERR_BACKEND")

    nixl_agent(prefill).add_remote_agent = fail
    register(prefill, decode)
    for _ in range(3):
        send_metadata(prefill, decode, ROOM)
    assert len(tried) == 2
    assert "NIXL_ERR_BACKEND" in registered_peer(prefill).refusal
    registered_peer(prefill).retry_at = 0.0  # ten seconds later
    del nixl_agent(prefill).add_remote_agent
    send_metadata(prefill, decode, ROOM + 1)
    assert registered_peer(prefill).refusal == ""
    assert send(prefill) == ALL


def test_agent_metadata_without_a_name_is_not_checked(prefill, decode, caplog):
    """Another release of NIXL may encode it differently; decode ranks must not be dropped then."""
    for manager in (prefill, decode):
        nixl_agent(manager).get_agent_metadata = lambda: b"length: 4" + b"peer"
    nixl_agent(prefill).add_remote_agent = lambda metadata: prefill.agent.peers.add(NAME)
    register(prefill, decode)
    assert registered_peer(prefill).refusal == "" and send(prefill) == ALL
    assert "metadata is not checked" in caplog.text


@pytest.mark.parametrize("limit", ["MAX_METADATA", "MAX_FRAME_BYTES"])
def test_oversized_frame_is_not_parsed(limit, prefill, decode, monkeypatch):
    """Its parsed numbers would take several times the memory of the frame."""
    message = fake_managers.registration_message(decode)
    lengths = [len(frame) for at, frame in enumerate(message) if at != METADATA_FRAME]
    metadata = len(message[METADATA_FRAME])
    longest = metadata if limit == "MAX_METADATA" else max(lengths)
    monkeypatch.setattr(message_checks, limit, longest)
    register(prefill, decode)
    assert NAME in prefill.decode_kv_args_table
    prefill.decode_kv_args_table.clear()
    monkeypatch.setattr(message_checks, limit, longest - 1)
    read = []
    monkeypatch.setattr(nixl.KVArgsRegisterInfo, "from_zmq", read.append)
    register(prefill, decode)
    assert not read and not prefill.decode_kv_args_table


def test_lost_peer_is_removed_after_its_early_connection_ends(connected):
    removed = record_removed_peers(connected)
    connected.connection.lost.add(NAME)
    connected.connecting[NAME] = reading = Connection(NAME, "handle", 0.0, next_read_at=None)
    reload_peers(connected, NAME)
    assert not removed and connected.connecting
    reading.next_read_at = time.monotonic() + 60
    reload_peers(connected, NAME)
    assert removed == [NAME] and not connected.connecting and reading.handle is None


def test_early_connection_ends_when_nixl_has_dropped_its_peer(connected):
    """The engine adds the peer again; a read would use the connection that was lost."""
    connected.connecting[NAME] = Connection(NAME, "handle", 0.0, next_read_at=60.0)
    reload_peers(connected, NAME)
    assert connected.connecting
    connected.agent.remove_remote_agent(NAME)
    reload_peers(connected, NAME)
    assert not connected.connecting


def record_early_connections(prefill) -> list[tuple]:
    asked = []
    prefill.connect_early = lambda *peer: asked.append(peer)
    return asked


def test_registering_decode_rank_is_connected_once(prefill, decode):
    asked = record_early_connections(prefill)
    for _ in range(2):
        register(prefill, decode)
    assert asked == [(NAME, list(decode.kv_args.aux_data_ptrs))]


def test_refused_decode_rank_is_not_connected(prefill):
    asked = record_early_connections(prefill)
    register(prefill, fake_managers.decode_rank("nixl", replace(mla_layout(), page_size=128)))
    assert registered_peer(prefill).refusal and not asked


def test_peer_lost_by_a_failed_early_connection_is_reloaded(connected):
    connected.agent.peers.discard(NAME)
    connected.handle_connect_failure(NAME)
    assert connected.agent.peers == {NAME}
    assert send(connected) == ALL
