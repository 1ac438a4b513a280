"""NIXL notifications: wire format, and when a room is complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_layout import Notification, TransferStatus, format_notification, parse_notification


@pytest.mark.parametrize(
    "notification, wire",
    [
        (Notification(7, "kv", chunk=2, is_last=True), b"7_kv_2_1_5"),
        (Notification(7, "kv", chunk=0, is_last=False), b"7_kv_0_0_5"),
        (Notification(7, "aux"), b"7_aux_5"),
        (Notification(7, "state"), b"7_state_5"),
        (
            Notification(7, "failed", reason="page_size 1 is not 16"),
            b"7_failed_5_page_size 1 is not 16",
        ),
    ],
)
def test_notification_wire_format(notification, wire):
    assert format_notification(notification, sender=5) == wire
    assert parse_notification(wire) == notification


@pytest.mark.parametrize(
    "wire, notification",
    [
        (b"7_kv_2_1_0", Notification(7, "kv", chunk=2, is_last=True)),
        (b"7_kv_2_1", Notification(7, "kv", chunk=2, is_last=True)),  # without a sender
        (b"7_aux", Notification(7, "aux")),
        (b"7_state_0", Notification(7, "state")),
    ],
)
def test_notifications_of_stock_prefill_are_parsed(wire, notification):
    assert parse_notification(wire) == notification


def parse_as_stock(message):
    """Parses a notification as stock decode does: up to four underscores, an integer sender."""
    parts = message.decode("ascii").split("_", 4)
    sender = int(parts[4]) if parts[1] == "kv" else None
    return int(parts[0]), parts[1], sender


@given(st.integers(0, 2**62), st.integers(0, 99), st.booleans(), st.integers(0, 999))
def test_stock_decode_parses_patched_notifications(room, chunk, is_last, sender):
    kv = format_notification(Notification(room, "kv", chunk=chunk, is_last=is_last), sender)
    assert parse_as_stock(kv) == (room, "kv", sender)
    assert parse_as_stock(format_notification(Notification(room, "aux"), sender))[:2] == (
        room,
        "aux",
    )
    failed = format_notification(Notification(room, "failed", reason="é_\n_x"), sender)
    assert parse_as_stock(failed)[:2] == (room, "failed")


@given(st.binary(max_size=40))
def test_invalid_notification_is_none(noise):
    parse_notification(noise)
    assert parse_notification(b"x_" + noise) is None


def complete_notifications(senders, chunks, state):
    for who in senders:
        for chunk in range(chunks):
            yield who, Notification(1, "kv", chunk=chunk, is_last=chunk == chunks - 1)
        yield who, Notification(1, "aux")
        if state:
            yield who, Notification(1, "state")


@given(
    senders=st.integers(1, 4),
    chunks=st.integers(1, 3),
    state=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_room_is_done_only_with_last_part(senders, chunks, state, order):
    """In any order, a room waits for each part; on stock it is done with the first aux."""
    parts = list(complete_notifications([f"agent-{i}" for i in range(senders)], chunks, state))
    order.shuffle(parts)
    status = TransferStatus(senders=senders, expects_state=state)
    for who, notification in parts:
        assert not status.is_done()
        status.add(who, notification)
        status.add(who, notification)
    assert status.is_done() and not status.is_failed()


def test_room_is_not_done_before_sender_count_is_known():
    status = TransferStatus()
    for who, notification in complete_notifications(["a"], 1, False):
        status.add(who, notification)
    assert not status.is_done()


def test_failed_room_is_done_when_all_senders_stopped():
    status = TransferStatus(senders=2)
    status.add("a", Notification(1, "failed", reason="why"))
    status.add("a", Notification(1, "failed", reason="why"))
    assert status.is_failing
    assert not status.is_done()
    status.add("b", Notification(1, "failed", reason="because of a"))
    assert status.is_done()
    assert status.is_failed()


def test_failed_room_does_not_wait_for_finished_sender():
    """One of two senders failed; the other's KV and metadata are written."""
    status = TransferStatus(senders=2)
    status.add("a", Notification(1, "failed", reason="why"))
    for who, notification in complete_notifications(["b"], 2, False):
        assert not status.is_done()
        status.add(who, notification)
    assert status.is_failed() and status.is_done()


def test_extra_chunk_revokes_a_complete_room():
    """Prefill sends it for a write that it abandons, so that decode waits for the failure."""
    status = TransferStatus(senders=1)
    for who, notification in complete_notifications(["a"], 2, False):
        status.add(who, notification)
    assert status.is_done() and not status.is_failed()
    status.add("a", Notification(1, "kv", chunk=1 << 31))
    assert not status.is_done()
    status.add("a", Notification(1, "failed", reason="why"))
    assert status.is_done() and status.is_failed()
