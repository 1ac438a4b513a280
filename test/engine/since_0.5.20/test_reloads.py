"""NIXL: a peer whose connection was lost, and its memory with it, until both are known again."""

import threading

import managers
import numpy as np
import pytest
from managers import BASE, BUFFER, DECODE, ENGINES, PAGE_BYTES, PATCHED, PEER, PREFILL
from msgspec.structs import replace
from sglang.srt.disaggregation.kv_layout import Heads
from sglang.srt.disaggregation.nixl.conn import NixlKVSender
from sglang.srt.disaggregation.pd import peer_sockets, readers, silence

from pd_harness.waiting import awaited

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

NAME = PEER["nixl"]
PAGES = np.array([4, 5], np.int32), np.array([8, 9], np.int32)


def met(own, peer, kinds=PATCHED):
    prefill = managers.rank("nixl", own, kinds=kinds)
    managers.read(prefill, managers.registration(managers.rank("nixl", peer, DECODE)))
    return prefill


def send(prefill):
    """A chunk; it is written or raises, or there is nothing to write."""
    prefill.agent.writes.clear()
    handle = prefill.send_kvcache(NAME, PAGES[0], managers.known(prefill).dst_kv_ptrs, PAGES[1], 0)
    assert (handle is None) == (not prefill.agent.writes)
    return sorted(prefill.agent.writes)


def lose(prefill) -> None:
    """NIXL drops a peer's memory with its connection; another room's failure loads it again."""
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
    prefill = met(managers.latents(), managers.latents())
    assert send(prefill) == ALL
    lose(prefill)
    assert prefill.agent.peers == {NAME}
    assert send(prefill) == ALL


def test_a_chunk_raises_after_a_reload_that_failed():
    """Else decode would be told that it has come."""
    prefill = met(managers.latents(), managers.latents())
    prefill.agent.is_failing = True
    lose(prefill)
    assert not prefill.agent.peers
    with pytest.raises(RuntimeError, match="NIXL knows no blocks of decode peer"):
        send(prefill)
    prefill.agent.is_failing = False
    lose(prefill)
    assert send(prefill) == ALL


def test_what_the_engine_does_after_a_reload_that_failed():
    """It lists the pages one by one, by a peer that NIXL does not know, which refuses it."""
    prefill = met(managers.latents(), managers.latents(), ENGINES)
    prefill.agent.is_failing = True
    lose(prefill)
    assert NAME not in prefill.prep_handles
    assert [length for *_, length in send(prefill)] == [2 * PAGE_BYTES] * 4


def test_a_peer_that_says_its_connection_is_lost_is_loaded_anew():
    """NIXL knows it still, so the engine alone would leave it at that."""
    prefill = met(managers.latents(), managers.latents())
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
def test_a_peer_that_rests_is_made_anew_when_it_asks(is_described):
    """It was cut off for long, has its process still, and so does not register."""
    prefill = managers.rank("nixl", managers.latents((64,) * 4))
    decode = managers.rank("nixl", managers.latents((64,) * 4), DECODE)
    managers.read(prefill, managers.registration(decode, is_described))
    plan = prefill.plan_of(NAME)
    for _ in range(2):
        assert prefill.rest(NAME)
        assert not prefill.prepared and not prefill.agent.peers and prefill.plan_of(NAME) is None
    managers.read(prefill, managers.request(decode, 7, [8, 9]))
    assert prefill.agent.peers == {NAME} and prefill.plan_of(NAME).layout == plan.layout
    assert prefill._why_unsent(7, slice(0, 2)) == ""
    assert send(prefill) == ALL


def test_a_peer_that_rests_and_registers_again():
    prefill = met(managers.latents(), managers.latents())
    prefill.rest(NAME)
    managers.read(prefill, managers.registration(managers.rank("nixl", managers.latents(), DECODE)))
    assert send(prefill) == ALL and not managers.known(prefill).refusal


def test_nothing_is_kept_of_a_peer_that_is_forgotten():
    prefill = met(managers.latents(), managers.latents())
    prefill.met[NAME] = managers.known(prefill)
    lose(prefill)
    prefill.rest(NAME)
    prefill._forget(NAME)
    tables = (prefill.decode_kv_args_table, prefill.prepared, prefill.agent.peers, prefill.met)
    assert not any((*tables, prefill._peer_reload_times, prefill.prep_handles))


def test_a_worker_waits_for_no_silent_peer_whose_room_was_cleared(monkeypatch):
    """A client leaves sooner than its decode server is known as silent; then others are served."""
    monkeypatch.setattr(managers.nixl, "NIXL_ERR_SETTLE_TIMEOUT_S", 0.1)
    prefill = met(managers.latents(), managers.latents())
    prefill.met[NAME] = managers.known(prefill)
    prefill.agent.check_xfer_state = lambda handle: "PROC"
    sender = NixlKVSender(prefill, "127.0.0.1:8998", 7)
    decode = managers.rank("nixl", managers.latents(), DECODE)
    managers.read(prefill, managers.request(decode, 7, [8, 9]))
    prefill.add_transfer_request(7, PAGES[0], slice(0, 2), True, aux_index=0)
    (queue,) = prefill.transfer_queues
    threading.Thread(target=prefill.transfer_worker, args=(queue,), daemon=True).start()
    assert awaited(lambda: len(managers.writes(prefill)) > len(ALL), 10, 0.01)
    sender.abort()
    assert not prefill.transfer_infos and queue.busy() == {NAME}
    monkeypatch.setattr(peer_sockets.PeerSocket, "silent_for", lambda self: silence.REST_SECONDS)
    prefill.replaced.add(NAME)
    prefill.look_at_peers()
    assert prefill.prepared and NAME in prefill.silent  # while it is written to
    assert awaited(lambda: not queue.busy(), 10, 0.01)
    prefill.look_at_peers()
    assert not (prefill.prepared or prefill.silent or prefill.decode_kv_args_table)
    assert not prefill.failure_records


@pytest.mark.parametrize("is_described", [True, False])
def test_a_peer_with_more_pages_than_prefill(is_described):
    own = managers.latents()
    peer = replace(own, kv=tuple(replace(buffer, pages=3 * buffer.pages) for buffer in own.kv))
    prefill = managers.rank("nixl", own)
    decode = managers.rank("nixl", peer, DECODE)
    managers.read(prefill, managers.registration(decode, is_described))
    last = np.array([3 * managers.PAGES - 1], np.int32)
    prefill.send_kvcache(NAME, PAGES[0][:1], managers.known(prefill).dst_kv_ptrs, last, 0)
    assert [dst for _, dst, _ in sorted(prefill.agent.writes)] == [
        BASE[DECODE] + layer * BUFFER + int(last[0]) * PAGE_BYTES for layer in range(4)
    ]


def replicas() -> tuple:
    """Four prefill ranks have two heads twice; the second of each pair has nothing to send."""
    own, peer = managers.heads(Heads(0, 1, 2), (1, 4)), managers.heads(Heads(0, 2, 2), (0, 1))
    return own, peer


def test_a_rank_that_has_nothing_for_a_peer_sends_nothing():
    prefill = met(*replicas())
    assert managers.known(prefill).plan is not None
    assert send(prefill) == []
    assert prefill.send_kvcache_slice(NAME, *PAGES) is None
    lose(prefill)
    assert send(prefill) == []


def test_the_first_of_its_pair_sends_its_head():
    own = managers.heads(Heads(0, 1, 2), (0, 4))
    prefill = met(own, replicas()[1])
    assert len(send(prefill)) == 2 * 2 * len(PAGES[0]) * managers.PAGE


def test_a_connection_that_is_lost_again_within_a_second_is_left_for_that_long():
    """The engine loads a peer once a second; one that is forgotten until then is out of reach."""
    prefill = met(managers.latents(), managers.latents())
    lose(prefill)
    prefill.connection.lost.add(NAME)
    prefill._reload_invalidated_peers({NAME: None})
    assert prefill.agent.peers == {NAME} and prefill.connection.lost == {NAME}
    prefill._peer_reload_times.clear()
    prefill._reload_invalidated_peers({NAME: None})
    assert prefill.agent.peers == {NAME} and not prefill.connection.lost
    assert send(prefill) == ALL


def test_other_peers_of_the_room_are_not_forgotten():
    prefill = met(managers.latents(), managers.latents())
    other = managers.rank("nixl", managers.latents(), DECODE)
    other.agent = managers.Agent("other")
    managers.read(prefill, managers.registration(other))
    assert prefill.agent.peers == {NAME, "other"}
    dropped = []
    remove = prefill.agent.remove_remote_agent
    prefill.agent.remove_remote_agent = lambda name: (dropped.append(name), remove(name))
    prefill.connection.lost.add(NAME)
    prefill._reload_invalidated_peers({NAME: None, "other": None})
    assert dropped == [NAME] and prefill.agent.peers == {NAME, "other"}


def test_a_lost_peer_of_another_room_is_kept_for_that_one():
    prefill = met(managers.latents(), managers.latents())
    prefill.connection.lost.add(NAME)
    prefill._reload_invalidated_peers({"other": None})
    assert prefill.connection.lost == {NAME}
    prefill._reload_invalidated_peers({NAME: None})
    assert not prefill.connection.lost


@pytest.mark.parametrize("is_described", [True, False])
def test_state_is_sent_by_lists_that_were_made_before(is_described):
    """As the engine's; where a peer does not say how many pages it has, each request names its."""
    own = managers.latents(index_keys=(512, 0, 512, 512))
    prefill = managers.rank("nixl", own)
    decode = managers.rank("nixl", own, DECODE)
    managers.read(prefill, managers.registration(decode, is_described))
    listed, made = [], prefill.agent.make_prepped_xfer
    prefill.agent.make_prepped_xfer = lambda *given: (listed.append(given), made(*given))[1]
    pages = (4, 6), (8, 11)  # no run of pages, which would be one copy
    state = ([list(pages[0])], [], [list(pages[1])])
    handles = list(prefill.maybe_send_extra(NAME, *state, 0))
    assert len(handles) == 1 and len(listed) == is_described
    starts = managers.STATE + BASE[PREFILL], managers.STATE + BASE[DECODE]
    assert sorted(prefill.agent.writes) == [
        (starts[0] + layer * BUFFER + int(a) * 512, starts[1] + layer * BUFFER + int(b) * 512, 512)
        for layer in (0, 2, 3)
        for a, b in zip(*pages)
    ]


def test_a_registration_that_fails_for_good_is_tried_every_ten_seconds(monkeypatch):
    """At once when its rank first asks for a room; others wait while it is tried."""
    prefill = managers.rank("nixl", managers.latents())
    decode = managers.rank("nixl", managers.latents(), DECODE)
    tried = []

    def fail(metadata: bytes) -> None:
        tried.append(metadata)
        raise RuntimeError("NIXL_ERR_BACKEND")

    prefill.agent.add_remote_agent = fail
    managers.read(prefill, managers.registration(decode))
    for _ in range(3):
        managers.read(prefill, managers.request(decode, 7, range(4)))
    assert len(tried) == 2
    assert "NIXL_ERR_BACKEND" in managers.known(prefill).refusal
    managers.known(prefill).not_before = 0.0  # ten seconds later
    del prefill.agent.add_remote_agent
    managers.read(prefill, managers.request(decode, 8, range(4)))
    assert managers.known(prefill).refusal == ""
    assert send(prefill) == ALL


def test_metadata_that_name_nobody_are_not_checked(caplog):
    """A release of NIXL may write them in another way; then all decode ranks would be dropped."""
    prefill = managers.rank("nixl", managers.latents())
    decode = managers.rank("nixl", managers.latents(), DECODE)
    for agent in (prefill.agent, decode.agent):
        agent.get_agent_metadata = lambda: b"length: 4" + b"peer"
    prefill.agent.add_remote_agent = lambda metadata: prefill.agent.peers.add(NAME)
    managers.read(prefill, managers.registration(decode))
    assert managers.known(prefill).refusal == "" and send(prefill) == ALL
    assert "metadata are not checked" in caplog.text


@pytest.mark.parametrize("limit", ["MAX_METADATA", "MAX_REGISTERED"])
def test_a_frame_that_is_too_long_is_not_read_at_all(monkeypatch, limit):
    """Its numbers would take several times as much memory."""
    prefill = managers.rank("nixl", managers.latents())
    message = managers.registration(managers.rank("nixl", managers.latents(), DECODE))
    metadata = managers.nixl.METADATA_FRAME
    lengths = [len(frame) for at, frame in enumerate(message) if at != metadata]
    longest = len(message[metadata]) if limit == "MAX_METADATA" else max(lengths)
    monkeypatch.setattr(readers, limit, longest)
    managers.read(prefill, message)
    assert NAME in prefill.decode_kv_args_table
    prefill.decode_kv_args_table.clear()
    monkeypatch.setattr(readers, limit, longest - 1)
    parse = managers.nixl.KVArgsRegisterInfo.from_zmq
    read = []
    monkeypatch.setattr(
        managers.nixl.KVArgsRegisterInfo, "from_zmq", lambda frames: (read.append(1), parse(frames))
    )
    managers.read(prefill, message)
    assert not read and not prefill.decode_kv_args_table


def test_a_peer_that_is_being_read_is_forgotten_when_that_is_over():
    prefill = met(managers.latents(), managers.latents())
    dropped = []
    prefill.agent.remove_remote_agent = dropped.append
    prefill.connection.lost.add(NAME)
    prefill.connecting.add(NAME)
    prefill._reload_invalidated_peers({NAME: None})
    assert not dropped
    prefill.connecting.clear()
    prefill._reload_invalidated_peers({NAME: None})
    assert dropped == [NAME]


def asked_early(prefill) -> list[tuple]:
    asked = []
    prefill.connect_early = lambda *peer: asked.append(peer)
    return asked


def test_a_decode_rank_that_registers_is_connected_to_once():
    prefill = managers.rank("nixl", managers.latents())
    asked = asked_early(prefill)
    decode = managers.rank("nixl", managers.latents(), DECODE)
    managers.read(prefill, *[managers.registration(decode)] * 2)
    assert asked == [(NAME, list(decode.kv_args.aux_data_ptrs))]


def test_one_that_is_refused_is_not_connected_to():
    prefill = managers.rank("nixl", managers.latents())
    asked = asked_early(prefill)
    other = managers.rank("nixl", replace(managers.latents(), page_size=128), DECODE)
    managers.read(prefill, managers.registration(other))
    assert managers.known(prefill).refusal and not asked


def test_one_that_nixl_forgot_when_it_could_not_connect_is_known_for_its_first_request():
    prefill = met(managers.latents(), managers.latents())
    prefill.agent.peers.discard(NAME)
    prefill.could_not_connect(NAME)
    assert prefill.agent.peers == {NAME}
    assert send(prefill) == ALL
