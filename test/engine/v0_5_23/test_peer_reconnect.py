"""NIXL: a decode rank whose connection and memory were lost, until prefill reloads both."""

import threading

import fake_managers
import numpy as np
import pytest
from fake_managers import BASE, BUFFER, DECODE, ENGINES, PAGE_BYTES, PATCHED, PEER, PREFILL
from msgspec.structs import replace
from sglang.srt.disaggregation.kv_layout import Heads
from sglang.srt.disaggregation.nixl.conn import NixlKVSender
from sglang.srt.disaggregation.pd import message_checks, peer_silence, peer_sockets

from pd_harness.polling import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

NAME = PEER["nixl"]
PAGES = np.array([4, 5], np.int32), np.array([8, 9], np.int32)


@pytest.fixture(autouse=True)
def is_listening(monkeypatch):
    """Whether the peer's process accepts connections."""
    answer = {"now": True}
    monkeypatch.setattr(peer_sockets.PeerSocket, "is_listening", lambda self: answer["now"])
    return answer


def prefill_with_peer(own, peer, kinds=PATCHED):
    prefill = fake_managers.make_manager("nixl", own, kinds=kinds)
    fake_managers.process_messages(
        prefill,
        fake_managers.registration_message(fake_managers.make_manager("nixl", peer, DECODE)),
    )
    return prefill


def send(prefill):
    """Sends a chunk; returns its writes, sorted."""
    prefill.agent.transfers.clear()
    handle = prefill.send_kvcache(
        NAME, PAGES[0], fake_managers.registered_peer(prefill).dst_kv_ptrs, PAGES[1], 0
    )
    assert (handle is None) == (not prefill.agent.transfers)
    return sorted(prefill.agent.transfers)


def lose_and_reload_peer(prefill) -> None:
    """NIXL drops a peer's memory with its connection; another room's failure reloads it."""
    prefill.agent.peers.discard(NAME)
    prefill._peer_reload_times.clear()
    prefill._reload_invalidated_peers({NAME: None})


ALL = sorted(
    (
        BASE[PREFILL] + layer * BUFFER + int(src) * PAGE_BYTES,
        BASE[DECODE] + layer * BUFFER + int(dst) * PAGE_BYTES,
        PAGE_BYTES,
    )
    for layer in range(4)
    for src, dst in zip(*PAGES)
)


def test_pages_are_written_before_and_after_a_reload():
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    assert send(prefill) == ALL
    lose_and_reload_peer(prefill)
    assert prefill.agent.peers == {NAME}
    assert send(prefill) == ALL


def test_chunk_raises_after_a_failed_reload():
    """Otherwise prefill would notify decode that the chunk has arrived."""
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    prefill.agent.is_failing = True
    lose_and_reload_peer(prefill)
    assert not prefill.agent.peers
    with pytest.raises(RuntimeError, match="connection to decode peer was lost"):
        send(prefill)
    prefill.agent.is_failing = False
    lose_and_reload_peer(prefill)
    assert send(prefill) == ALL


@pytest.mark.parametrize("nixl_knows_it", [True, False])
def test_peer_whose_process_is_gone_is_not_added(is_listening, nixl_knows_it):
    """UCX may abort prefill if the peer refuses the connection; stock adds it at once."""
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    added, add = [], prefill.agent.add_remote_agent
    prefill.agent.add_remote_agent = lambda metadata: (added.append(metadata), add(metadata))[1]
    is_listening["now"] = False
    if nixl_knows_it:
        prefill.connection.lost.add(NAME)
        prefill._reload_invalidated_peers({NAME: None})
    else:
        lose_and_reload_peer(prefill)
    assert not added
    is_listening["now"] = True
    prefill._reload_invalidated_peers({NAME: None})
    assert len(added) == 1 and prefill.agent.peers == {NAME}
    assert send(prefill) == ALL


def test_stock_adds_a_peer_whose_process_is_gone(is_listening):
    is_listening["now"] = False
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout(), ENGINES)
    lose_and_reload_peer(prefill)
    assert prefill.agent.peers == {NAME}


def test_stock_sends_to_an_unknown_peer_after_a_failed_reload():
    """Stock lists the chunk's pages for a peer that NIXL does not know; NIXL refuses them."""
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout(), ENGINES)
    prefill.agent.is_failing = True
    lose_and_reload_peer(prefill)
    assert NAME not in prefill.prep_handles
    assert [length for *_, length in send(prefill)] == [2 * PAGE_BYTES] * 4


def test_peer_is_reloaded_after_a_disconnect_error():
    """NIXL still knows the peer, so the engine alone would not reload it."""
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    dropped = []
    remove = prefill.agent.remove_remote_agent

    def removed(name: str) -> None:
        dropped.append(name)
        remove(name)

    def refuse(_):
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    prefill.agent.remove_remote_agent = removed
    prefill.agent.transfer, transfer = refuse, prefill.agent.transfer
    with pytest.raises(Exception, match="NIXL_ERR_REMOTE_DISCONNECT"):
        send(prefill)
    prefill.agent.transfer = transfer
    prefill._reload_invalidated_peers({NAME: None})
    assert dropped == [NAME] and prefill.agent.peers == {NAME}
    assert send(prefill) == ALL
    prefill._peer_reload_times.clear()
    prefill._reload_invalidated_peers({NAME: None})
    assert dropped == [NAME]


@pytest.mark.parametrize("is_described", [True, False])
def test_released_peer_is_reloaded_by_its_metadata(is_described):
    """The peer was cut off for long, but its process runs on, so it does not register again."""
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout((64,) * 4))
    decode = fake_managers.make_manager("nixl", fake_managers.mla_layout((64,) * 4), DECODE)
    fake_managers.process_messages(
        prefill, fake_managers.registration_message(decode, is_described)
    )
    plan = prefill.plan_for(NAME)
    for _ in range(2):
        assert prefill.release_peer(NAME)
        assert not prefill.prepared and not prefill.agent.peers and prefill.plan_for(NAME) is None
    fake_managers.process_messages(prefill, fake_managers.metadata_message(decode, 7, [8, 9]))
    assert prefill.agent.peers == {NAME} and prefill.plan_for(NAME).layout == plan.layout
    assert prefill._refusal_reason(7, slice(0, 2)) == ""
    assert send(prefill) == ALL


def test_released_peer_may_register_again():
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    prefill.release_peer(NAME)
    fake_managers.process_messages(
        prefill,
        fake_managers.registration_message(
            fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
        ),
    )
    assert send(prefill) == ALL and not fake_managers.registered_peer(prefill).refusal


def test_dropped_peer_leaves_no_entries():
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    prefill.watched_peers[NAME] = fake_managers.registered_peer(prefill)
    lose_and_reload_peer(prefill)
    prefill.release_peer(NAME)
    prefill._drop_silent_peer(NAME)
    tables = (
        prefill.decode_kv_args_table,
        prefill.prepared,
        prefill.agent.peers,
        prefill.watched_peers,
    )
    assert not any((*tables, prefill._peer_reload_times, prefill.prep_handles))


def test_worker_does_not_wait_for_silent_peer_of_a_cleared_room(monkeypatch):
    """The client leaves before its decode rank counts as silent; then the worker is free."""
    monkeypatch.setattr(fake_managers.nixl, "NIXL_ERR_SETTLE_TIMEOUT_S", 0.1)
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    prefill.watched_peers[NAME] = fake_managers.registered_peer(prefill)
    prefill.agent.check_xfer_state = lambda handle: "PROC"
    sender = NixlKVSender(prefill, "127.0.0.1:8998", 7)
    decode = fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    fake_managers.process_messages(prefill, fake_managers.metadata_message(decode, 7, [8, 9]))
    prefill.add_transfer_request(7, PAGES[0], slice(0, 2), True, aux_index=0)
    (queue,) = prefill.transfer_queues
    threading.Thread(target=prefill.transfer_worker, args=(queue,), daemon=True).start()
    assert wait_until(lambda: len(fake_managers.posted_copies(prefill)) > len(ALL), 10, 0.01)
    sender.abort()
    assert not prefill.transfer_infos and queue.busy_peers() == {NAME}
    monkeypatch.setattr(
        peer_sockets.PeerSocket, "silent_for", lambda self: peer_silence.RELEASE_AFTER_SECONDS
    )
    prefill.replaced_peers.add(NAME)
    prefill.check_peers()
    assert prefill.prepared and NAME in prefill.silent_peers  # while a write runs
    assert wait_until(lambda: not queue.busy_peers(), 10, 0.01)
    prefill.check_peers()
    assert not (prefill.prepared or prefill.silent_peers or prefill.decode_kv_args_table)
    assert not prefill.failure_records


@pytest.mark.parametrize("is_described", [True, False])
def test_peer_with_more_pages_than_prefill_is_sent_all(is_described):
    own = fake_managers.mla_layout()
    peer = replace(own, kv=tuple(replace(buffer, pages=3 * buffer.pages) for buffer in own.kv))
    prefill = fake_managers.make_manager("nixl", own)
    decode = fake_managers.make_manager("nixl", peer, DECODE)
    fake_managers.process_messages(
        prefill, fake_managers.registration_message(decode, is_described)
    )
    last = np.array([3 * fake_managers.PAGES - 1], np.int32)
    prefill.send_kvcache(
        NAME, PAGES[0][:1], fake_managers.registered_peer(prefill).dst_kv_ptrs, last, 0
    )
    assert [dst for _, dst, _ in sorted(prefill.agent.transfers)] == [
        BASE[DECODE] + layer * BUFFER + int(last[0]) * PAGE_BYTES for layer in range(4)
    ]


def replicas() -> tuple:
    """Four prefill ranks hold two heads, each twice; the second replica has nothing to send."""
    own, peer = (
        fake_managers.mha_layout(Heads(0, 1, 2), (1, 4)),
        fake_managers.mha_layout(Heads(0, 2, 2), (0, 1)),
    )
    return own, peer


def test_rank_without_heads_for_a_peer_sends_nothing():
    prefill = prefill_with_peer(*replicas())
    assert fake_managers.registered_peer(prefill).plan is not None
    assert send(prefill) == []
    assert prefill.send_kvcache_slice(NAME, *PAGES) is None
    lose_and_reload_peer(prefill)
    assert send(prefill) == []


def test_first_replica_sends_the_shared_head():
    own = fake_managers.mha_layout(Heads(0, 1, 2), (0, 4))
    prefill = prefill_with_peer(own, replicas()[1])
    assert len(send(prefill)) == 2 * 2 * len(PAGES[0]) * fake_managers.PAGE


def test_no_reload_within_the_cooldown():
    """The engine reloads a peer at most once a second; a peer dropped sooner is unreachable."""
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    lose_and_reload_peer(prefill)
    prefill.connection.lost.add(NAME)
    prefill._reload_invalidated_peers({NAME: None})
    assert prefill.agent.peers == {NAME} and prefill.connection.lost == {NAME}
    prefill._peer_reload_times.clear()
    prefill._reload_invalidated_peers({NAME: None})
    assert prefill.agent.peers == {NAME} and not prefill.connection.lost
    assert send(prefill) == ALL


def test_reload_keeps_other_peers_of_the_room():
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    other = fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    other.agent = fake_managers.FakeNixlAgent("other")
    fake_managers.process_messages(prefill, fake_managers.registration_message(other))
    assert prefill.agent.peers == {NAME, "other"}
    dropped = []
    remove = prefill.agent.remove_remote_agent
    prefill.agent.remove_remote_agent = lambda name: (dropped.append(name), remove(name))
    prefill.connection.lost.add(NAME)
    prefill._reload_invalidated_peers({NAME: None, "other": None})
    assert dropped == [NAME] and prefill.agent.peers == {NAME, "other"}


def test_lost_peer_is_reloaded_only_by_its_own_room():
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    prefill.connection.lost.add(NAME)
    prefill._reload_invalidated_peers({"other": None})
    assert prefill.connection.lost == {NAME}
    prefill._reload_invalidated_peers({NAME: None})
    assert not prefill.connection.lost


@pytest.mark.parametrize("is_described", [True, False])
def test_state_is_sent_with_prepared_descriptor_lists(is_described):
    """For a peer that does not announce its number of pages, each request lists its pages."""
    own = fake_managers.mla_layout(index_keys=(512, 0, 512, 512))
    prefill = fake_managers.make_manager("nixl", own)
    decode = fake_managers.make_manager("nixl", own, DECODE)
    fake_managers.process_messages(
        prefill, fake_managers.registration_message(decode, is_described)
    )
    listed, made = [], prefill.agent.make_prepped_xfer
    prefill.agent.make_prepped_xfer = lambda *given: (listed.append(given), made(*given))[1]
    pages = (4, 6), (8, 11)  # adjacent pages would be one copy
    state = ([list(pages[0])], [], [list(pages[1])])
    handles = list(prefill.maybe_send_extra(NAME, *state, 0))
    assert len(handles) == 1 and len(listed) == is_described
    starts = fake_managers.STATE + BASE[PREFILL], fake_managers.STATE + BASE[DECODE]
    assert sorted(prefill.agent.transfers) == [
        (starts[0] + layer * BUFFER + int(a) * 512, starts[1] + layer * BUFFER + int(b) * 512, 512)
        for layer in (0, 2, 3)
        for a, b in zip(*pages)
    ]


def test_failing_registration_is_retried_every_ten_seconds(monkeypatch):
    """The rank's first request retries it at once; other ranks wait during each attempt."""
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout())
    decode = fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    tried = []

    def fail(metadata: bytes) -> None:
        tried.append(metadata)
        raise RuntimeError("NIXL_ERR_BACKEND")

    prefill.agent.add_remote_agent = fail
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode))
    for _ in range(3):
        fake_managers.process_messages(prefill, fake_managers.metadata_message(decode, 7, range(4)))
    assert len(tried) == 2
    assert "NIXL_ERR_BACKEND" in fake_managers.registered_peer(prefill).refusal
    fake_managers.registered_peer(prefill).retry_at = 0.0  # ten seconds later
    del prefill.agent.add_remote_agent
    fake_managers.process_messages(prefill, fake_managers.metadata_message(decode, 8, range(4)))
    assert fake_managers.registered_peer(prefill).refusal == ""
    assert send(prefill) == ALL


def test_agent_metadata_without_a_name_is_not_checked(caplog):
    """Another release of NIXL may encode it differently; decode ranks must not be dropped then."""
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout())
    decode = fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    for agent in (prefill.agent, decode.agent):
        agent.get_agent_metadata = lambda: b"length: 4" + b"peer"
    prefill.agent.add_remote_agent = lambda metadata: prefill.agent.peers.add(NAME)
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode))
    assert fake_managers.registered_peer(prefill).refusal == "" and send(prefill) == ALL
    assert "metadata is not checked" in caplog.text


@pytest.mark.parametrize("limit", ["MAX_METADATA", "MAX_FRAME_BYTES"])
def test_oversized_frame_is_not_parsed(monkeypatch, limit):
    """Its parsed numbers would take several times the memory of the frame."""
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout())
    message = fake_managers.registration_message(
        fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    )
    metadata = fake_managers.nixl.METADATA_FRAME
    lengths = [len(frame) for at, frame in enumerate(message) if at != metadata]
    longest = len(message[metadata]) if limit == "MAX_METADATA" else max(lengths)
    monkeypatch.setattr(message_checks, limit, longest)
    fake_managers.process_messages(prefill, message)
    assert NAME in prefill.decode_kv_args_table
    prefill.decode_kv_args_table.clear()
    monkeypatch.setattr(message_checks, limit, longest - 1)
    parse = fake_managers.nixl.KVArgsRegisterInfo.from_zmq
    read = []
    monkeypatch.setattr(
        fake_managers.nixl.KVArgsRegisterInfo,
        "from_zmq",
        lambda frames: (read.append(1), parse(frames)),
    )
    fake_managers.process_messages(prefill, message)
    assert not read and not prefill.decode_kv_args_table


def test_lost_peer_is_removed_after_its_early_connection_ends():
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    dropped = []
    prefill.agent.remove_remote_agent = dropped.append
    prefill.connection.lost.add(NAME)
    prefill.connecting.add(NAME)
    prefill._reload_invalidated_peers({NAME: None})
    assert not dropped
    prefill.connecting.clear()
    prefill._reload_invalidated_peers({NAME: None})
    assert dropped == [NAME]


def record_early_connections(prefill) -> list[tuple]:
    asked = []
    prefill.connect_early = lambda *peer: asked.append(peer)
    return asked


def test_registering_decode_rank_is_connected_once():
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout())
    asked = record_early_connections(prefill)
    decode = fake_managers.make_manager("nixl", fake_managers.mla_layout(), DECODE)
    fake_managers.process_messages(prefill, *[fake_managers.registration_message(decode)] * 2)
    assert asked == [(NAME, list(decode.kv_args.aux_data_ptrs))]


def test_refused_decode_rank_is_not_connected():
    prefill = fake_managers.make_manager("nixl", fake_managers.mla_layout())
    asked = record_early_connections(prefill)
    other = fake_managers.make_manager(
        "nixl", replace(fake_managers.mla_layout(), page_size=128), DECODE
    )
    fake_managers.process_messages(prefill, fake_managers.registration_message(other))
    assert fake_managers.registered_peer(prefill).refusal and not asked


def test_peer_lost_by_a_failed_early_connection_is_reloaded():
    prefill = prefill_with_peer(fake_managers.mla_layout(), fake_managers.mla_layout())
    prefill.agent.peers.discard(NAME)
    prefill.handle_connect_failure(NAME)
    assert prefill.agent.peers == {NAME}
    assert send(prefill) == ALL
