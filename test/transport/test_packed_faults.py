"""A request that loses a part or a round of its packed heads fails, and the next one is right.

Decode interleaves only what has arrived as a whole, and nothing of an aborted request afterwards.
"""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from engine_release import SINCE_0_5_23
from error_texts import ABORTED, LOST_DECODE, PACKED_FAILURES
from fleet import Fleet, Outcome, Servers, Side
from rank_faults import INJECTED_ERROR
from transfer_checks import (
    BACKENDS,
    HEARTBEAT,
    PAGES,
    PROBE_ENVIRONMENT,
    assert_failed,
    assert_no_room_kept,
    assert_recovers,
    assert_right,
    assert_transfers,
    nightly_except,
    packing_counts,
)

from pd_harness.polling import is_in_time

pytestmark = pytest.mark.transport

PROBING = {"environment": PROBE_ENVIRONMENT}
ROOM = 900
SRC, DST, CHUNKS = PAGES
LATE = 3.0  # seconds after which a delayed write starts
INTERLEAVES = "decode could not interleave KV heads: "
RESTART_SECONDS = 1.0


def packing(backend: str, **more) -> Fleet:
    """Returns a fleet whose prefill rank packs each chunk in one round for each decode rank."""
    return Fleet(Side(**PROBING), Side(tp=2, **more), backend=backend, v_width=4)


def interleaving(backend: str, **more) -> Fleet:
    return Fleet(Side(tp=2, **PROBING), Side(**more), backend=backend, layers=4)


def send_to_open_room(servers: Servers, pool: ThreadPoolExecutor) -> list[Future]:
    """Sends the room from all prefill ranks, in threads of the pool."""
    return [pool.submit(servers.send, rank, ROOM, SRC, CHUNKS, 15) for rank in servers.prefill]


def assert_request_failed(outcome: Outcome, said: str, rank_may_succeed: bool) -> None:
    """Asserts that a request failed on both sides, with `said` as reason.

    Args:
        rank_may_succeed: Whether one decode rank may have received everything when the other fails.
            A server's ranks agree on the failure.
    """
    ends = [one for one in outcome.decode if not rank_may_succeed or one["state"] != "right"]
    assert_failed(dataclasses.replace(outcome, decode=tuple(ends)), said)


def assert_decode_failed(outcome: Outcome, said: str) -> None:
    (decode,) = outcome.decode
    assert decode["state"] == "failed" and said in decode["reason"], outcome
    assert is_in_time(decode["seconds"], 15), outcome


@pytest.mark.parametrize(
    "case", nightly_except(PACKED_FAILURES, ("nixl", "late status")), ids="-".join
)
def test_failing_round_fails_only_its_request(serve, case):
    """Rounds 1 and 2 bring the first chunk to the decode ranks, round 4 a part of the second.

    Over NIXL in 0.5.9 threads pack for both ranks at the same time, so that their order may differ.
    """
    backend, how = case
    is_parallel = backend == "nixl" and not SINCE_0_5_23
    with serve(packing(backend)) as servers:
        assert_transfers(servers)
        for at in (1, 4):
            servers.prefill[0].call("plan_faults", how=how, at=[at])
            outcome = servers.request(*PAGES, room=ROOM)
            assert_request_failed(outcome, PACKED_FAILURES[backend, how], is_parallel)
            assert_recovers(servers)
            assert_right(servers, *PAGES, room=ROOM)
        assert_no_room_kept(servers)


@pytest.mark.parametrize("at", nightly_except([1, 3], 3))
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_request_without_one_part_is_not_interleaved(serve, backend, at):
    """One prefill rank fails at its chunk `at`; the other one writes all its parts."""
    with serve(interleaving(backend)) as servers:
        assert_transfers(servers)
        before = packing_counts(servers)
        servers.prefill[1].call("plan_faults", how="exception", at=[at])
        assert_decode_failed(servers.request(*PAGES, room=ROOM), INJECTED_ERROR)
        assert packing_counts(servers) == before
        assert_recovers(servers)
        assert_right(servers, *PAGES, room=ROOM)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_chunks_that_one_rank_does_not_report_fail_the_request(serve, backend):
    """Such as of a prefill server whose ranks have different patch sets."""
    with serve(interleaving(backend)) as servers:
        assert_transfers(servers)
        before = packing_counts(servers)
        servers.prefill[0].call("report_units", does=False)
        said = f"{INTERLEAVES}1 of 2 prefill ranks report chunks to interleave"
        assert_decode_failed(servers.request(*PAGES), said)
        assert packing_counts(servers) == before
        servers.prefill[0].call("report_units", does=True)
        assert_transfers(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_failing_interleaving_fails_only_its_request(serve, backend):
    with serve(interleaving(backend)) as servers:
        assert_transfers(servers)
        servers.decode[0].call("plan_interleaving_faults", how="exception", at=[5])
        assert_decode_failed(servers.request(*PAGES, room=ROOM), f"{INTERLEAVES}{INJECTED_ERROR}")
        assert_transfers(servers)
        assert_right(servers, *PAGES, room=ROOM)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_aborted_request_is_interleaved_no_further(serve, backend):
    """Decode aborts it during the second of many buffers, and then gives its pages back."""
    with serve(interleaving(backend)) as servers:
        assert_transfers(servers)
        (decode,), (before,) = servers.decode, packing_counts(servers)[1]
        decode.call("plan_interleaving_faults", how="wait", at=[2], seconds=1.0)
        decode.call("open_room", room=ROOM, pages=DST)
        with ThreadPoolExecutor() as pool:
            sent = send_to_open_room(servers, pool)
            aborted = decode.call("abort_while_interleaving", room=ROOM, seconds=15)
            assert {one.result()["state"] for one in sent} == {"success"}
        assert aborted["state"] == "failed" and ABORTED in aborted["reason"], aborted
        assert aborted["changed"] == [], aborted
        assert packing_counts(servers)[1] == [before + 2]
        assert_transfers(servers)
        assert_right(servers, *PAGES, room=ROOM)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS))
def test_abort_between_two_parts_keeps_pages_until_both_are_written(serve, backend):
    with serve(interleaving(backend)) as servers:
        assert_transfers(servers)
        (decode,), before = servers.decode, packing_counts(servers)
        servers.prefill[1].call("plan_faults", how="wait", at=[1], seconds=LATE)
        with ThreadPoolExecutor() as pool:
            sent = send_to_open_room(servers, pool)
            aborted = decode.call("abort_after", room=ROOM, pages=DST, after=1.0, seconds=15)
            assert "hang" not in {one.result()["state"] for one in sent}
        late = servers.prefill[1].call("delayed_transfer")["began_at"]
        assert aborted["state"] == "failed" and aborted["over_at"] > late > 0, (aborted, late)
        assert aborted["changed"] == [], aborted
        assert packing_counts(servers) == before
        assert_transfers(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS))
def test_prefill_killed_between_two_parts(serve, backend):
    """The second rank kills its server before it writes its second chunk."""
    with serve(interleaving(backend, environment=HEARTBEAT)) as servers:
        assert_transfers(servers)
        before = packing_counts(servers)[1]
        dying = servers.pids("prefill")  # the rank itself is the last of them
        servers.prefill[1].call("plan_faults", how="kill", at=[2], pids=dying)
        outcome = servers.request(*PAGES)
        assert outcome.prefill[1]["state"] == "died", outcome
        assert_decode_failed(outcome, "")
        assert [rank.call("health")["interleaved"] for rank in servers.decode] == before
        time.sleep(RESTART_SECONDS)
        servers.start("prefill")
        assert_transfers(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS))
def test_decode_killed_between_two_rounds(serve, backend):
    """NIXL's writes over shared memory need no answer, and may finish before decode dies."""
    with serve(packing(backend)) as servers:
        assert_transfers(servers)
        dying = servers.pids("decode")
        servers.prefill[0].call("plan_faults", how="kill", at=[2], pids=dying)
        outcome = servers.request(*PAGES, seconds=90)
        (prefill,) = outcome.prefill
        assert {answer["state"] for answer in outcome.decode} == {"died"}, outcome
        assert prefill["state"] in ("success", "failed"), outcome
        assert is_in_time(prefill["seconds"], 60), outcome
        if backend == "mooncake":
            assert LOST_DECODE[backend] in prefill.get("reason", ""), outcome
        time.sleep(RESTART_SECONDS)
        servers.start("decode")
        assert_recovers(servers)


@pytest.mark.parametrize("fleet", nightly_except([packing, interleaving], packing))
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_lost_connections_are_restored(serve, backend, fleet):
    """A request that fails by a lost connection is the last one that does.

    Where a worker writes to one decode rank after the other, the next rank's connection may fail
    another request.
    """
    with serve(fleet(backend)) as servers:
        assert_transfers(servers)
        for cutting in (*servers.prefill, *servers.decode):
            assert cutting.call("cut_connections")["cut"]
            for _ in servers.decode:
                states = {answer["state"] for answer in servers.request(*PAGES).decode}
                assert states <= {"right", "failed"}, states
            assert_recovers(servers)
