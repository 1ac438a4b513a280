"""A reused room id is a new request; a decode rank that registers again is a new peer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from engine_release import IS_0_5_18, SINCE_0_5_18, without_extension_frames
from error_texts import ABORTED, DECODE_ABORTED
from fleet import Fleet, Outcome, Servers
from rank_faults import INJECTED_ERROR
from raw_socket import DST, RawSocket, await_read, recorded_messages
from transfer_checks import (
    BACKENDS,
    assert_eventually,
    assert_failed,
    assert_no_room_kept,
    assert_right,
    nightly_except,
)

from pd_harness.polling import is_in_time

pytestmark = pytest.mark.transport

ROOM, OTHER = 900, 901
# Indices into decode's messages as `Rank.record_messages` returns them.
OPENED, ABORT, NOT_OPENED = 1, 2, 3
SRC = [9, 2, 3, 7]
REQUEST = (SRC, DST, [2, 2])


def prefill_first(servers: Servers) -> Outcome:
    """Sends another request of the room, which reaches prefill before decode opens it."""
    servers.prefill[0].call("start_request", room=ROOM)
    return servers.request(*REQUEST, room=ROOM)


def decode_first(servers: Servers) -> Outcome:
    """Sends another request of the room, which decode opens before it reaches prefill."""
    (prefill,), (decode,) = servers.prefill, servers.decode
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(servers.receive, decode, ROOM, DST, 20)
        assert_eventually(
            lambda: prefill.call("room_counts")["transfer_infos"] > 0 or receiving.done(), True
        )
        sent = servers.send(prefill, ROOM, SRC, [2, 2], 20)
        return Outcome.of((sent,), (receiving.result(),))


def assert_aborted(servers: Servers, rank, by_decode: bool = True) -> None:
    """Asserts that the room has failed on this rank because one side aborted it."""
    is_notified = rank is servers.prefill[0] and by_decode
    said = DECODE_ABORTED[servers.fleet.backend] if is_notified else ABORTED
    answer = rank.timed("wait_for_room", room=ROOM, seconds=10)
    assert answer["state"] == "failed" and said in answer["reason"], answer
    assert is_in_time(answer["seconds"], 4), answer


def open_request(servers: Servers) -> None:
    """Opens a request on both sides; it waits until prefill computes it."""
    (prefill,), (decode,) = servers.prefill, servers.decode
    prefill.call("start_request", room=ROOM)
    decode.call("open_room", room=ROOM, pages=DST)
    assert_eventually(lambda: prefill.call("room_counts")["transfer_infos"], 1)


def prefill_aborts(servers: Servers) -> None:
    open_request(servers)
    servers.prefill[0].call("abort", room=ROOM)
    for rank in (servers.prefill[0], servers.decode[0]):
        assert_aborted(servers, rank, by_decode=False)


def decode_aborts(servers: Servers) -> None:
    open_request(servers)
    servers.decode[0].call("abort", room=ROOM)
    for rank in (servers.prefill[0], servers.decode[0]):
        assert_aborted(servers, rank)


def decode_aborts_before_metadata(servers: Servers) -> None:
    """Aborts on decode when prefill has the request but no metadata."""
    for rank in (servers.prefill[0], servers.decode[0]):
        rank.call("start_request", room=ROOM)
    servers.decode[0].call("abort", room=ROOM)
    for rank in (servers.decode[0], servers.prefill[0]):
        assert_aborted(servers, rank)


def transfer_fails(servers: Servers) -> None:
    servers.prefill[0].call("plan_faults", how="exception", at=[2])
    assert_failed(servers.request(*REQUEST, room=ROOM), INJECTED_ERROR)


FAILURES = [prefill_aborts, decode_aborts, decode_aborts_before_metadata, transfer_fails]


@pytest.mark.parametrize("again", [prefill_first, decode_first])
@pytest.mark.parametrize(
    "fail", nightly_except(FAILURES, decode_aborts_before_metadata, transfer_fails)
)
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_failed_room_id_can_be_reused(serve, backend, fail, again):
    with serve(Fleet(backend=backend)) as servers:
        assert_right(servers, *REQUEST, room=OTHER)
        for _ in range(2):
            fail(servers)
            outcome = again(servers)
            assert outcome.state == "right", outcome
        assert_no_room_kept(servers)


@pytest.mark.parametrize("again", [prefill_first, decode_first])
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_abort_without_a_request_affects_at_most_one_reuse(serve, backend, again):
    """Decode aborts a room whose request may still reach prefill, or never will."""
    with serve(Fleet(backend=backend)) as servers:
        assert_right(servers, *REQUEST, room=OTHER)
        servers.decode[0].call("start_request", room=ROOM)
        servers.decode[0].call("abort", room=ROOM)
        assert_aborted(servers, servers.decode[0])
        if not SINCE_0_5_18:  # later releases do not remember such an abort
            assert_eventually(
                lambda: servers.prefill[0].call("is_aborted_before_request", room=ROOM), True
            )
        # Prefill has read decode's earlier messages once this request is served.
        assert_right(servers, *REQUEST, room=OTHER + 1)
        outcome = again(servers)
        if outcome.state != "right":
            assert_failed(outcome, ABORTED)
        outcome = again(servers)
        assert outcome.state == "right", outcome


def test_conclusion_does_not_write_to_a_reused_room(serve):
    """With Mooncake, a conclusion waits in the rank's queue behind its writes."""
    with serve(Fleet(backend="mooncake")) as servers:
        assert_right(servers, *REQUEST, room=OTHER)
        again = []
        for room in (910, 911, 912):
            messages = recorded_messages(servers.decode[0], room)
            again += [messages[OPENED], messages[ABORT], messages[OPENED]]
        servers.prefill[0].call("plan_faults", how="wait", at=[1], seconds=1.5)
        with ThreadPoolExecutor(1) as pool, closing(RawSocket(servers.prefill[0])) as sock:
            writing = pool.submit(assert_right, servers, *REQUEST, room=ROOM)
            sock.send(again)
            writing.result()
        assert_right(servers, *REQUEST, room=ROOM)


def register_again(servers: Servers, registration: list[bytes]) -> RawSocket:
    """Replaces the decode rank's registration on prefill; returns the socket that sent it."""
    sock = RawSocket(servers.prefill[0])
    sock.send([registration])
    await_read(sock, servers.decode[0], 0, NOT_OPENED)
    return sock


@pytest.mark.parametrize(
    "trailing",
    [[], [b"1"], [b"a fork's own", b"\1\2\3"], [b"", b"", b"16"]],
    ids=["stock", "a_number", "two", "three"],
)
@pytest.mark.parametrize("backend", nightly_except(BACKENDS))
def test_stock_decode_replaces_a_patched_one(serve, backend, trailing):
    """A stock engine, or a fork of it, registers at the same address and is served like stock."""
    with serve(Fleet(backend=backend, v_width=4)) as servers:
        assert_right(servers, *REQUEST, room=OTHER)
        registration = recorded_messages(servers.decode[0], ROOM)[0]
        register_again(servers, without_extension_frames(registration) + trailing).close()
        if not (IS_0_5_18 and backend == "nixl"):  # whose stock decode is told of no failure
            servers.prefill[0].call("plan_faults", how="exception", at=[2])
            outcome = servers.request(*REQUEST, room=ROOM)
            assert outcome.prefill[0]["state"] == outcome.decode[0]["state"] == "failed", outcome
            if backend == "mooncake" and not SINCE_0_5_18:  # 0.5.9 sends stock decode no reason
                assert "no reason given" in outcome.decode[0]["reason"], outcome
        assert_right(servers, *REQUEST, room=ROOM)
        register_again(servers, registration).close()
        transfer_fails(servers)
        assert_right(servers, *REQUEST, room=ROOM)


@pytest.mark.parametrize(
    "backend, what", [("nixl", "plan"), ("nixl", "connect"), ("mooncake", "plan")]
)
def test_failed_registration_is_retried(serve, backend, what):
    with serve(Fleet(backend=backend)) as servers:
        assert servers.prefill[0].call("fail_next_registration", what=what) == {"state": "done"}
        for _ in range(2):
            assert_right(servers, *REQUEST, room=ROOM)
