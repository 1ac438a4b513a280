"""NIXL notifications: wire format, and when a room is complete."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_layout import (
    LayoutError,
    Notification,
    TransferStatus,
    agreed_units,
    format_notification,
    parse_notification,
)


@pytest.mark.parametrize(
    "notification, wire",
    [
        (Notification(7, "kv", chunk=2, is_last=True), b"7_kv_2_1_5"),
        (Notification(7, "kv", chunk=0, is_last=False), b"7_kv_0_0_5"),
        (Notification(7, "kv", chunk=2, is_last=True, unit=(16, 20)), b"7_kv_2_1_5_16-20"),
        (Notification(7, "kv", unit=(0, 0)), b"7_kv_0_0_5_0-0"),  # of an empty chunk
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


counts = st.integers(0, 1 << 40)


@given(counts, counts, st.booleans(), counts, st.none() | st.tuples(counts, counts))
def test_chunk_round_trip(room, chunk, is_last, sender, unit):
    sent = Notification(room, "kv", chunk, is_last, unit=unit)
    assert parse_notification(format_notification(sender=sender, notification=sent)) == sent


@given(st.binary(max_size=40))
def test_invalid_notification_is_none(noise):
    parse_notification(noise)
    assert parse_notification(b"x_" + noise) is None


@pytest.mark.parametrize("pages", [b"3", b"3-", b"-3", b"-", b"3-5-7", b"a-b", b"3-5.0", b"-1-5"])
def test_chunk_with_garbled_pages_is_none(pages):
    assert parse_notification(b"7_kv_2_1_5_3-5") is not None
    assert parse_notification(b"7_kv_2_1_5_" + pages) is None


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


def test_units_are_kept_for_each_sender():
    """In any order, and repeated; a sender of slices has none."""
    status = TransferStatus(senders=3)
    chunks = [
        Notification(1, "kv", chunk=1, is_last=True, unit=(3, 5)),
        Notification(1, "kv", chunk=0, unit=(0, 3)),
    ]
    for who, sent in (("a", chunks), ("b", chunks[::-1])):
        for notification in (*sent, Notification(1, "aux"), *sent):
            status.add(who, notification)
    for who, notification in complete_notifications(["c"], 2, False):
        assert not status.is_done()
        status.add(who, notification)
    assert status.is_done()
    assert [sorted(units) for units in status.units] == [[(0, 3), (3, 5)], [(0, 3), (3, 5)], []]
    assert agreed_units(status.units[:2], 2, 5) == [(0, 3), (3, 5)]
    with pytest.raises(LayoutError, match="2 of 3 prefill ranks"):
        agreed_units(status.units, 3, 5)


@pytest.mark.parametrize("named", [0, 1])
def test_sender_that_names_a_part_of_its_chunks_is_refused(named):
    """All senders may have lost the same name; what it names would stay in parts."""
    status = TransferStatus(senders=1)
    units = [(0, 3), (3, 5)]
    for chunk in (0, 1):
        unit = units[chunk] if chunk == named else None
        status.add("a", Notification(1, "kv", chunk, is_last=chunk == 1, unit=unit))
    with pytest.raises(LayoutError, match=rf"of chunks \[0, 1\] .* only \[{named}\]"):
        status.units  # noqa: B018
