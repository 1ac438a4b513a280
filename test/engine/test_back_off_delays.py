"""How long prefill backs off from a decode rank to which transfers fail."""

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.pd import back_off

pytestmark = pytest.mark.engine

PEER = "10.0.0.1:4000"


@pytest.fixture
def clock(monkeypatch):
    """A fake clock, which tests advance."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(back_off, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def fail_attempt(failed: back_off.FailedSessions, clock, seconds: float) -> None:
    """Records a failure that takes `seconds`, as the engine's transfer worker does."""
    assert PEER not in failed
    clock.now += seconds
    failed.add(PEER)


def back_off_delays(clock, seconds: float, tries: int) -> list[float]:
    """The delay after each of `tries` failures, which take `seconds` each; retries at once."""
    failed, found = back_off.FailedSessions(), []
    for _ in range(tries):
        fail_attempt(failed, clock, seconds)
        begun = clock.now
        while PEER in failed:
            clock.now += 0.5
        found.append(clock.now - begun)
    return found


@pytest.mark.parametrize(
    "seconds, delays",
    [(0, [1, 2, 4, 8, 16, 30, 30]), (5, [10, 20, 40, 50, 50, 50]), (30, [60, 120, 240])],
)
def test_delays_start_short_and_double(clock, seconds, delays):
    """Delays after slow failures are longer: `seconds` is the duration of each."""
    assert back_off_delays(clock, seconds, len(delays)) == delays


@pytest.mark.parametrize("cut", [0.5, 2.0])
@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_peer_is_served_within_5_s_of_a_short_outage(clock, cut, seconds):
    """Requests keep coming during an outage of `cut` seconds; each failure takes `seconds`."""
    failed, back = back_off.FailedSessions(), clock.now + cut
    while True:
        clock.now += 0.1
        if PEER in failed:
            continue
        if clock.now >= back:
            break
        clock.now += seconds
        failed.add(PEER)
    assert clock.now - back < 5


@pytest.mark.parametrize(
    "end",
    [lambda failed: failed.reset([PEER, "another"]), lambda failed: failed.discard(PEER)],
    ids=["success", "registration or answer"],
)
def test_success_registration_and_answer_reset_the_delay(clock, end):
    failed = back_off.FailedSessions()
    for _ in range(4):
        fail_attempt(failed, clock, 0.0)
        clock.now += 40
    failed.add(PEER)
    assert PEER in failed and list(failed) == [PEER]
    end(failed)
    fail_attempt(failed, clock, 0.0)
    clock.now += 1
    assert PEER not in failed


def test_lookup_does_not_change_the_delay(clock):
    """The engine's probe looks sessions up, too, and iterates over them."""
    failed = back_off.FailedSessions()
    failed.add(PEER)
    clock.now += 2
    assert PEER not in failed
    assert list(failed) == [PEER]
    failed.reset([PEER])
    assert not list(failed)


def test_probe_does_not_take_a_session_that_is_tried_again_for_recovered(clock):
    failed = back_off.FailedSessions()
    failed.add(PEER)
    clock.now += 2
    with failed.showing_all():
        assert PEER in failed and "another" not in failed
    assert PEER not in failed


def test_back_off_starts_only_with_a_second_failure(clock):
    peers = back_off.PeerBackoff()
    peers.note_failure(PEER, 0.0)
    assert not peers.is_backing_off(PEER)
    peers.note_failure(PEER, 0.0)
    assert peers.retry_in(PEER) == 1
