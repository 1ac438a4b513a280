"""A mutated message from a peer affects its own request and nothing else.

No thread stops, no process crashes, and no write leaves the peer's pools. At worst, the message's
own request fails or gets wrong bytes. A mutated registration affects all requests of its decode
rank until prefill reads the rank's valid registration again.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from itertools import count

import numpy as np
import pytest
from engine_release import (
    IS_DEFAULT,
    SINCE_0_5_18,
    SINCE_0_5_23,
    without_extension_frames,
)
from fleet import Fleet, Servers, Side
from raw_socket import DST, FIRST_MARKER_ROOM, Message, RawSocket, await_read, recorded_messages
from transfer_checks import HANG_SECONDS, assert_right, nightly_except

from pd_harness.polling import wait_until

pytestmark = pytest.mark.transport

BATCH, BATCHES = 100, 40
HANDLED_COUNT = 30 if SINCE_0_5_18 else 150
BACKENDS = ["nixl", "mooncake", "ascend"]
# Backends whose prefill sends a status message when a room ends; 0.5.9 uses NIXL notifications.
STATUS_BACKENDS = BACKENDS if SINCE_0_5_18 else BACKENDS[1:]
NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(1200)]
FUZZED_COUNTS = [BATCH if SINCE_0_5_18 else 1500]
if IS_DEFAULT:
    FUZZED_COUNTS.append(pytest.param(1500, marks=NIGHTLY))
SRC = [9, 2, 3, 7]
PAGES = (SRC, DST)
# Far apart, so that a mutated number does not hit another room by chance.
FIRST_ROOM, OTHER_ROOM = 20_483_617, 731_046_852_095
RIGHT_ROOM = 1_570_629_301  # this room and later ones are not attacked
# With the default time-outs a side would wait for minutes after a wrong message.
TIMEOUTS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "5",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "5",
    # Some garbled messages end a room on one side only, and decode waits for prefill.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}
MAX_GROWTH = 48 << 20
BIG = 8 << 20
# Indices into the messages that `Rank.record_messages` returns on decode and on prefill.
REGISTRATION, NOT_OPENED = 0, 3
OF_ROOMS = slice(1, 4)
SUCCESS = 0
ENDS, METADATA = slice(3), slice(3, None)
LARGE_FRAMES = {"session": b"\xff" * BIG, "pointers": b"\1" * BIG}

NUMBERS = [b"-1", b"0", b"4294967296", b"9" * 5000, b"0x10", b"1e3", b"None", b"nan", "٣".encode()]
FOREIGN_MESSAGES = [
    [b"GET /health HTTP/1.1\r\nHost: prefill\r\n\r\n"],
    [b""],
    [b"junk"],
    [b"ABORT"],
    [b"None"],
    [b"AUX_DATA"],
    [b"KVL1"],
    [b"{}"] * 200,
    [b""] * 33,
    [b"None"] * 13,
    [b"\xff" * (1 << 16)],
]


def fuzzed_message(rng: random.Random, messages: list[Message]) -> Message:
    """Returns one of the messages with one to three mutations, or a foreign message."""
    if rng.random() < 0.02:
        return list(rng.choice(FOREIGN_MESSAGES))
    message: Message = []
    while not message or message in messages:
        message = list(rng.choice(messages))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(MUTATIONS)(rng, message)
    return message


def flip_bit(rng, message):
    i = rng.randrange(len(message))
    if frame := bytearray(message[i]):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        message[i] = bytes(frame)


def change_bytes(rng, message):
    i = rng.randrange(len(message))
    at = rng.randrange(len(message[i]) + 1)
    message[i] = message[i][:at] + rng.randbytes(4) + message[i][at + 4 :]


def truncate_frame(rng, message):
    i = rng.randrange(len(message))
    message[i] = message[i][: rng.randrange(len(message[i]) + 1)]


def truncate_message(rng, message):
    del message[rng.randrange(1, len(message) + 1) :]


def drop_frame(rng, message):
    if len(message) > 1:
        del message[rng.randrange(len(message))]


def repeat_frame(rng, message):
    message.insert(rng.randrange(len(message) + 1), rng.choice(message))


def swap_frames(rng, message):
    i, j = rng.randrange(len(message)), rng.randrange(len(message))
    message[i], message[j] = message[j], message[i]


def empty_frame(rng, message):
    message[rng.randrange(len(message))] = b""


def random_frame(rng, message):
    message[rng.randrange(len(message))] = rng.randbytes(rng.choice((1, 4, 8, 64, 4096)))


def shift_address(rng, message):
    """Shifts one pointer of a frame that may hold pointers, slightly or to unmapped memory."""
    i = rng.randrange(len(message))
    if message[i] and len(message[i]) % 8 == 0:
        numbers = np.frombuffer(message[i], dtype=np.uint64).copy()
        shift = rng.choice((8, 512, 1 << 13, 1 << 20, 1 << 44)) * rng.choice((1, -1))
        numbers[rng.randrange(numbers.size)] += np.array(shift).astype(np.uint64)
        message[i] = numbers.tobytes()


def odd_number(rng, message):
    message[rng.randrange(len(message))] = rng.choice(NUMBERS)


MUTATIONS = [
    flip_bit,
    change_bytes,
    truncate_frame,
    truncate_message,
    drop_frame,
    repeat_frame,
    swap_frames,
    empty_frame,
    random_frame,
    shift_address,
    odd_number,
]


@contextlib.contextmanager
def unharmed(servers: Servers, sock: RawSocket, rooms: int = 0, reasons: int = 0):
    """Asserts that the block leaves the rank unchanged and the two servers working.

    Args:
        rooms: How many rooms prefill may keep, which wait for their requests.
        reasons: How many failure reasons decode may keep. 0.5.23's decode keeps a reason for ever
            if it arrives just after its room has ended.
    """
    (prefill,), (decode,) = servers.prefill, servers.decode
    before = sock.rank.call("health")
    prefill.call("record_writes")
    yield
    assert_right(servers, *PAGES)
    after = sock.rank.call("health")
    assert not set(before["threads"]) - set(after["threads"])
    assert after["peers"] <= before["peers"] + rooms
    assert after["peak"] - before["peak"] < MAX_GROWTH
    kept = decode.call("room_counts")
    assert kept.pop("failure_records", 0) <= reasons, kept
    assert set(kept.values()) == {0}, kept
    kept = prefill.call("room_counts")
    assert max(kept.values()) <= rooms, kept
    written = prefill.call("writes_outside", ranges=decode.call("registered_buffers"))
    assert written["done"] and not written["outside"], written


@pytest.fixture()
def connected_fleet(serve):
    """A function that runs a fleet, connects its two ranks, and opens a socket to one of them."""

    @contextlib.contextmanager
    def run(backend: str, side: str, engine: str = "patched"):
        each = Side(environment=TIMEOUTS if engine == "patched" else {})
        fleet = Fleet(each, each, backend=backend, v_width=4)
        with serve(fleet, engine, engine) as servers:
            servers.rooms = count(RIGHT_ROOM)
            assert_right(servers, *PAGES)
            with contextlib.closing(RawSocket(getattr(servers, side)[0])) as sock:
                yield servers, sock

    return run


def batches(mutants: int, seed: int):
    """Yields, per batch, its number, the room to serve meanwhile, and a function that draws it.

    The function takes messages and returns mutants of them. There are at most `BATCHES` batches,
    because a batch's request often ends with a time-out.
    """
    rng = random.Random(seed)
    size = max(BATCH, mutants // BATCHES)

    def draw(messages: list[Message]) -> list[Message]:
        return [fuzzed_message(rng, messages) for _ in range(size)]

    for number in range(mutants // size):
        yield number, FIRST_ROOM + number, draw


def request_under_attack(
    servers: Servers, sock: RawSocket, room: int, mutants: list[Message]
) -> None:
    """Asserts that the request ends, or that its metadata goes to a slot that a mutant names."""
    with sock.sending(mutants):
        outcome = servers.request(*PAGES, room=room)
    states = {answer["state"] for answer in (*outcome.prefill, *outcome.decode)}
    assert states <= {"success", "right", "wrong", "no metadata", "failed"}, outcome


def send_invalid_bytes(sock: RawSocket) -> None:
    """Sends garbage bytes, and to 0.5.9, which limits frames, an oversized frame."""
    if not SINCE_0_5_18:
        sock.send_oversized()
    sock.send_non_zmq_bytes()


@pytest.mark.parametrize("mutants", FUZZED_COUNTS)
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl", "mooncake"))
def test_fuzzed_decode_messages(connected_fleet, backend, mutants):
    """Mutates registrations, metadata and ABORTs of a live decode rank and a live room."""
    with connected_fleet(backend, "prefill") as (servers, sock), unharmed(servers, sock, mutants):
        (decode,) = servers.decode
        for number, room, draw in batches(mutants, seed=1):
            messages = recorded_messages(decode, room)
            request_under_attack(servers, sock, room, draw(messages))
            sock.send([messages[REGISTRATION]])
            await_read(sock, decode, number, NOT_OPENED)
            decode.call("rebaseline")
            assert_right(servers, *PAGES)
        send_invalid_bytes(sock)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_fuzzed_messages_reach_the_handler(connected_fleet, backend):
    """Prefill sends to a mutated registration or room; the next request is right."""
    ends = Counter()
    with (
        connected_fleet(backend, "prefill") as (servers, sock),
        unharmed(servers, sock, HANDLED_COUNT),
    ):
        (prefill,), (decode,) = servers.prefill, servers.decode
        rng, kept = random.Random(5), 0
        for number in range(HANDLED_COUNT):
            room = FIRST_ROOM + number
            registration, opened, *_ = messages = recorded_messages(decode, room)
            ask = [registration, opened]
            i = rng.randrange(2)
            ask[i] = fuzzed_message(rng, ask[i : i + 1])
            sock.send(ask)
            await_read(sock, decode, number, NOT_OPENED)
            end = {"state": "not opened"}
            if prefill.call("room_counts")["transfer_infos"] > kept:
                end = servers.send(prefill, room, SRC, seconds=1)
            assert end["state"] in ("not opened", "success", "failed", "hang"), (ask, end)
            ends[end["state"]] += 1
            sock.send([registration, messages[NOT_OPENED]])
            await_read(sock, decode, number, NOT_OPENED)
            assert decode.call("rebaseline") == {"state": "done"}, (ask, end)
            assert_right(servers, *PAGES)
            kept = prefill.call("room_counts")["transfer_infos"]
    assert ends["success"] and ends["failed"]


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_fuzzed_messages_of_other_rooms(connected_fleet, backend):
    """Messages in decode's name that open and abort a room do not affect other rooms."""
    with connected_fleet(backend, "prefill") as (servers, sock), unharmed(servers, sock, 5 * BATCH):
        (decode,) = servers.decode
        messages = recorded_messages(decode, OTHER_ROOM)[OF_ROOMS]
        for number, _, draw in batches(5 * BATCH, seed=4):
            with sock.sending(draw(messages)):
                assert_right(servers, *PAGES)
            await_read(sock, decode, number, NOT_OPENED)


@pytest.mark.parametrize("mutants", FUZZED_COUNTS)
@pytest.mark.parametrize("backend", nightly_except(STATUS_BACKENDS, "nixl", "mooncake"))
def test_fuzzed_prefill_messages(connected_fleet, backend, mutants):
    """Mutates a room's status messages and chunks, and then, between requests, any metadata."""
    reasons = BATCHES if SINCE_0_5_23 else 0
    with (
        connected_fleet(backend, "decode") as (servers, sock),
        unharmed(servers, sock, reasons=reasons),
    ):
        prefill = servers.prefill[0]
        for number, room, draw in batches(mutants, seed=2):
            messages = recorded_messages(prefill, room)[ENDS]
            request_under_attack(servers, sock, room, draw(messages))
            await_read(sock, prefill, number, SUCCESS)
            servers.decode[0].call("rebaseline")
            assert_right(servers, *PAGES)
        metadata = recorded_messages(prefill, FIRST_ROOM)[METADATA]
        rng = random.Random(3)
        sock.send([fuzzed_message(rng, metadata) for _ in range(mutants) if metadata])
        await_read(sock, prefill, mutants, SUCCESS)
        send_invalid_bytes(sock)


@pytest.mark.parametrize(
    "backend, message",
    [
        pytest.param("nixl", b"junk", id="nixl"),
        pytest.param("mooncake", b"\xff\xfe", id="mooncake"),
        pytest.param("mooncake", b"junk", id="mooncake-ascii", marks=pytest.mark.nightly),
    ],
)
def test_invalid_message_kills_stock_thread(connected_fleet, backend, message):
    with connected_fleet(backend, "prefill", "stock") as (servers, sock):
        before = set(sock.rank.call("health")["threads"])
        sock.send([[message]])
        assert wait_until(lambda: before - set(sock.rank.call("health")["threads"]), 10), before
        outcome = servers.request(*PAGES, seconds=HANG_SECONDS)
        assert outcome.state == "hang", outcome


def stock_request_messages(
    servers: Servers, room: int, **changes: bytes
) -> tuple[Message, Message]:
    """Returns a stock decode rank's registration and metadata message, with some frames changed."""
    guard = int(servers.fleet.backend == "nixl")
    positions = {"session": 3 + guard, "metadata": 4 + guard, "pointers": 4 + 2 * guard}
    registration, opened, *_ = recorded_messages(servers.decode[0], room)
    registration = without_extension_frames(registration)
    for name, frame in changes.items():
        registration[positions[name]] = frame
    opened[positions["session"]] = registration[positions["session"]]
    return registration, opened


@pytest.mark.parametrize("frame", LARGE_FRAMES)
@pytest.mark.parametrize("backend", nightly_except(["nixl", "mooncake"], "mooncake"))
def test_large_frame_is_neither_stored_nor_logged(connected_fleet, fork_server, backend, frame):
    log = fork_server("patched").log
    with connected_fleet(backend, "prefill") as (servers, sock), unharmed(servers, sock):
        before = log.stat().st_size
        changes = {"session": b"10.0.0.1:2", frame: LARGE_FRAMES[frame]}
        registration, opened = stock_request_messages(servers, FIRST_MARKER_ROOM, **changes)
        # Later releases keep a room of an unregistered rank until the room's request has failed.
        sock.send([registration] if SINCE_0_5_18 else [registration, opened])
        await_read(sock, servers.decode[0], 1, NOT_OPENED)
        assert log.stat().st_size - before < 1 << 20


def test_agent_metadata_of_another_name_is_harmless(connected_fleet):
    """NIXL drops the agent that the metadata name if it cannot load the metadata."""
    with connected_fleet("nixl", "prefill") as (servers, sock), unharmed(servers, sock):
        metadata = recorded_messages(servers.decode[0], FIRST_MARKER_ROOM)[0][5]
        changes = {"session": b"another", "metadata": metadata[:-20]}
        sock.send(stock_request_messages(servers, FIRST_MARKER_ROOM, **changes)[:1])
        await_read(sock, servers.decode[0], 1, NOT_OPENED)


def test_invalid_session_address_is_harmless(connected_fleet):
    """The scheduler's thread parses the session's port when it sends the room."""
    with connected_fleet("mooncake", "prefill") as (servers, sock), unharmed(servers, sock):
        sock.send(stock_request_messages(servers, RIGHT_ROOM + 1, session=b"nowhere"))
        await_read(sock, servers.decode[0], 1, NOT_OPENED)
