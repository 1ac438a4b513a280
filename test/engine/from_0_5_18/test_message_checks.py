"""Invalid messages are dropped; they crash no thread, and the next message is read.

The tests run the loops of the engine's own threads: an exception that leaves one would crash it.
"""

import struct
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import fake_managers
import pytest
from engine_release import IS_0_5_18
from fake_managers import BACKENDS, ENGINES, PEER, metadata_message, process_messages
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.staging_handler import PrefillStagingContext
from sglang.srt.disaggregation.kv_layout import Heads, encode_units
from sglang.srt.disaggregation.pd.message_checks import MAX_CHUNKS, MAX_FRAMES, drop_invalid
from sglang.srt.disaggregation.pd.unit_exchange import UNITS, units_message
from sglang.srt.disaggregation.pd.verify_exchange import DIGESTS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM = 7
MODELS = {
    "latents": fake_managers.mla_layout((64 * 132, 0, 64 * 132, 0)),
    "heads": fake_managers.mha_layout(Heads(0, 2, 2), (0, 1), 256),
}
NUMBERS = [b"-1", b"0", b"x", b"", b"\xff", b"1e3", b"9" * 30]
FOREIGN_MESSAGES = [
    [b"hello"],
    [b""],
    [b"\xff\xfe"],
    [b"1", b"2", b"3", b"4"],
    [b""] * 4,
    [b"x"] * 65,
]


def prefill_rank(backend, model="latents", **more):
    """A prefill rank with staging buffers that waits for room 7."""
    staging = {"enable_staging": True, "_staging_ctx": PrefillStagingContext()}
    prefill = fake_managers.prefill_rank(backend, MODELS[model], **{**staging, **more})
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    return prefill


def wait_for_room(decode, room: int) -> None:
    """Makes a decode rank wait for a room from one prefill rank."""
    decode.request_status[room] = KVPoll.WaitingForInput
    decode.prefill_response_tracker[room] = set()
    decode.required_prefill_response_num_table[room] = 1


def decode_rank(backend, **more):
    """A decode rank with staging buffers that waits for room 7."""
    handler = SimpleNamespace(_room_to_decode_req={}, handle_chunk_arrived=lambda *_: None)
    handler.is_staging_room = lambda room: False
    staging = {"enable_staging": True, "_staging_handler": handler}
    decode = fake_managers.decode_rank(backend, MODELS["latents"], **{**staging, **more})
    wait_for_room(decode, ROOM)
    return decode


@pytest.fixture
def prefill(backend):
    return prefill_rank(backend)


@pytest.fixture
def decode(backend):
    return decode_rank(backend)


def request(backend, model="latents", room=ROOM, **more) -> list[bytes]:
    """The metadata message with which a decode rank requests a room."""
    return metadata_message(fake_managers.decode_rank(backend, MODELS[model]), room, **more)


def messages_to_prefill(backend, model="latents") -> tuple[list[bytes], list[bytes]]:
    """A registration, and the metadata message that requests room 7."""
    decode = fake_managers.decode_rank(backend, MODELS[model])
    ask = request(backend, model, state_indices=[[1, 2]])
    return fake_managers.registration_message(decode), ask


def is_waiting_for_input(prefill, room: int = ROOM) -> bool:
    return prefill.request_status[room] == KVPoll.WaitingForInput


def _check_of(manager):
    is_prefill = manager.disaggregation_mode == fake_managers.PREFILL
    return manager._check_prefill_message if is_prefill else manager._check_decode_message


def accepted(manager, message: list[bytes]) -> list[bytes] | None:
    """The message as the engine's thread gets it; None if it is dropped, or handled before."""
    check = _check_of(manager)
    recv = fake_managers.FakeSocket([list(message), [b"END"]]).recv_multipart
    got = drop_invalid(recv, lambda frames: frames != [b"END"] and check(frames))()
    return None if got == [b"END"] else got


def is_valid(manager, message: list[bytes]) -> bool:
    """Returns whether a message is read, by the engine's thread or before it."""
    try:
        _check_of(manager)(list(message))
    except Exception:
        return False
    return True


def assert_accepted(manager, message: list[bytes]) -> None:
    """Asserts that a message is valid; but for 0.5.18, that the engine's thread gets it."""
    assert is_valid(manager, message)
    assert IS_0_5_18 or accepted(manager, message) == message


# To prefill


def test_valid_messages_to_prefill_are_accepted(backend, prefill):
    registration, ask = messages_to_prefill(backend)
    staging = [
        [b"WATERMARK", b"1", b"64", PEER[backend].encode()],
        [b"WATERMARK", b"1", b"64"],
        [b"STAGING_RSP", b"7", b"3", b"0", b"1", b"64", PEER[backend].encode()],
        [b"STAGING_RSP", b"7", b"3", b"-1", b"0", b"-1", PEER[backend].encode()],
        [b"STAGING_RSP", b"7", b"%d" % (MAX_CHUNKS - 1), b"0", b"1", b"64", b"x"],
    ]
    aborts = [[b"ABORT", b"9"], [b"ABORT", b"9", b"127.0.0.1", b"5555", b"1"]]
    for message in (registration, registration[:-1], ask, *staging, *aborts):
        assert_accepted(prefill, message)
    process_messages(prefill, registration, ask, *staging[:3])
    assert is_waiting_for_input(prefill)
    assert fake_managers.registered_peer(prefill).plan is not None
    assert prefill._staging_ctx.remote_watermarks
    assert prefill.transfer_infos[ROOM][PEER[backend]].staging.offsets == [-1, -1, -1, 0]


@pytest.mark.parametrize("message", FOREIGN_MESSAGES, ids=repr)
def test_foreign_messages_to_prefill_are_dropped(message, backend, prefill):
    assert accepted(prefill, message) is None
    process_messages(prefill, message, *messages_to_prefill(backend))
    assert is_waiting_for_input(prefill)
    assert list(prefill.transfer_infos) == [ROOM]


@pytest.mark.parametrize("model", MODELS)
def test_truncated_registrations_are_dropped(model, backend):
    """With too few frames they are invalid; with more, they are those of an older release."""
    registration, ask = messages_to_prefill(backend, model)
    least = {"mooncake": 10, "nixl": 13}[backend]
    for count in range(1, len(registration)):
        prefill = prefill_rank(backend, model)
        is_read = is_valid(prefill, registration[:count])
        assert is_read == (count >= least)
        process_messages(prefill, registration[:count], ask)
        assert is_waiting_for_input(prefill)
        assert list(prefill.decode_kv_args_table) == [PEER[backend]] * is_read


def test_truncated_metadata_messages_are_dropped(backend):
    registration, ask = messages_to_prefill(backend)
    for count in range(1, len(ask)):
        prefill = prefill_rank(backend)
        assert is_valid(prefill, ask[:count]) == (count >= 8)
        process_messages(prefill, ask[:count], registration, ask)
        assert is_waiting_for_input(prefill)


frames = st.one_of(
    st.binary(max_size=40), st.sampled_from(NUMBERS), st.integers(-9, 999).map(lambda n: b"%d" % n)
)


@st.composite
def garbled(draw, message: list[bytes]) -> list[bytes]:
    """A message with some frames replaced, cut, swapped, left out or added."""
    message = list(message)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(message) - 1)))
        change = draw(st.sampled_from(["replace", "cut", "flip", "leave out", "add", "swap"]))
        frame = message[at] if message else b""
        if change == "add" or not message:
            message.insert(at, draw(frames))
        elif change == "replace":
            message[at] = draw(frames)
        elif change == "cut":
            message[at] = frame[: draw(st.integers(0, len(frame)))]
        elif change == "flip" and frame:
            byte = draw(st.integers(0, len(frame) - 1))
            changed = frame[byte] ^ draw(st.integers(1, 255))
            message[at] = frame[:byte] + bytes([changed]) + frame[byte + 1 :]
        elif change == "leave out" and len(message) > 1:
            del message[at]
        else:
            other = draw(st.integers(0, len(message) - 1))
            message[at], message[other] = message[other], message[at]
    return message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbled_messages_do_not_stop_the_prefill_thread(backend, model, data):
    """A garbled message may pass as another decode rank's; the next valid one is always read."""
    prefill = prefill_rank(backend, model)
    good = messages_to_prefill(backend, model)
    bad = [data.draw(garbled(message)) for message in good]
    other = 8  # a room that garbled messages are unlikely to name
    process_messages(prefill, *bad)
    prefill.request_status[other] = KVPoll.Bootstrapping
    prefill.transfer_infos.pop(other, None)
    process_messages(prefill, good[0], request(backend, model, other))
    assert is_waiting_for_input(prefill, other)
    assert PEER[backend] in prefill.decode_kv_args_table


# The frame of each field in a metadata message.
REQUEST = {
    "mooncake": {"room": 0, "slot": 5, "ranks": 7},
    "nixl": {"room": 1, "slot": 6, "ranks": 7},
}


@pytest.mark.parametrize("frame", ["room", "slot", "ranks"])
@pytest.mark.parametrize("number", [b"-1", b"-7", b"x", b"", b"\xff"])
def test_metadata_messages_with_invalid_numbers_are_dropped(frame, number, backend, prefill):
    _, ask = messages_to_prefill(backend)
    bad = list(ask)
    bad[REQUEST[backend][frame]] = number
    assert accepted(prefill, bad) is None
    process_messages(prefill, bad, ask)
    assert is_waiting_for_input(prefill)
    assert list(prefill.transfer_infos) == [ROOM]


@pytest.mark.parametrize("pages, state", [([0, -1], [[1]]), ([0, 1], [[2], [-3]])])
def test_metadata_messages_with_negative_pages_are_dropped(pages, state, backend, prefill):
    bad = request(backend, pages=pages, state_indices=state)
    assert accepted(prefill, bad) is None
    process_messages(prefill, bad)
    assert not prefill.transfer_infos


INVALID_NAMES = {
    "mooncake": [b"", b"host", b"host:", b":1", b"host:-1", b"host:x", b"host: 1", b"h\xc3\xb6st:1"]
    + [b"host:1_", b"host:\xd9\xa1", b"x" * 300 + b":1"],
    "nixl": [b"", b"\xff", b"x" * 300],
}
NAME_FRAMES = {"mooncake": 3, "nixl": 4}


@pytest.mark.parametrize(
    "backend, name", [(backend, name) for backend in BACKENDS for name in INVALID_NAMES[backend]]
)
def test_messages_with_invalid_rank_names_are_dropped(backend, name, prefill):
    """Over Mooncake, the scheduler chooses the queue of the room's chunks by the name's port."""
    for bad in messages_to_prefill(backend):
        bad[NAME_FRAMES[backend]] = name
        assert accepted(prefill, bad) is None
        process_messages(prefill, bad)
    assert not prefill.transfer_infos and not prefill.decode_kv_args_table


@pytest.mark.parametrize(
    "session", [b"10.0.0.1:1", b"[::1]:65535", b"node-7.local:12001", b"127.0.0.1:17217_10565"]
)
def test_valid_mooncake_session_ids_are_accepted(session):
    prefill = prefill_rank("mooncake")
    _, ask = messages_to_prefill("mooncake")
    ask[NAME_FRAMES["mooncake"]] = session
    process_messages(prefill, ask)
    assert list(prefill.transfer_infos[ROOM]) == [session.decode()]


STAGING_TO_PREFILL = [
    [b"WATERMARK"],
    [b"WATERMARK", b"1"],
    [b"WATERMARK", b"x", b"1", b"peer"],
    [b"WATERMARK", b"1", b"\xff", b"peer"],
    [b"WATERMARK", b"1", b"2", b"\xff"],
    *([b"STAGING_RSP", *[b"1"] * count] for count in range(6)),
    [b"STAGING_RSP", b"7", b"-5", b"0", b"0", b"0", b"peer"],
    [b"STAGING_RSP", b"7", b"2000000", b"0", b"0", b"0", b"peer"],
    [b"STAGING_RSP", b"7", b"%d" % MAX_CHUNKS, b"0", b"0", b"0", b"peer"],
    *([b"STAGING_RSP", b"7", b"1", wrong, b"0", b"0", b"peer"] for wrong in (b"x", b"", b"\xff")),
    [b"STAGING_RSP", b"7", b"1", b"0", b"0", b"0", b"\xff"],
]


@pytest.mark.parametrize("message", STAGING_TO_PREFILL, ids=repr)
def test_invalid_staging_messages_to_prefill_are_dropped(message, backend, prefill):
    assert accepted(prefill, message) is None
    process_messages(prefill, *messages_to_prefill(backend), message, message)
    assert prefill.transfer_infos[ROOM][PEER[backend]].staging is None
    assert not prefill._staging_ctx.remote_watermarks


@pytest.mark.parametrize("message", [*FOREIGN_MESSAGES[:2], *STAGING_TO_PREFILL[:5]], ids=repr)
def test_stock_prefill_thread_crashes_on_an_invalid_message(message, backend):
    with pytest.raises((IndexError, ValueError, AssertionError)):
        process_messages(prefill_rank(backend, kinds=ENGINES), message)


@pytest.mark.parametrize("word", [b"WATERMARK", b"STAGING_RSP"])
def test_staging_messages_without_staging_are_dropped(word, backend):
    """They crash stock Mooncake's thread."""
    prefill = prefill_rank(backend, enable_staging=False, _staging_ctx=None)
    message = [word, b"7", b"1", b"0", b"0", b"0", b"peer"]
    process_messages(prefill, message, *messages_to_prefill(backend))
    assert is_waiting_for_input(prefill)


# To decode


def status(backend, room: int = ROOM, state: int = KVPoll.Success) -> list[bytes]:
    """Prefill's message with the final status of a room."""
    prefill = fake_managers.prefill_rank(backend, MODELS["latents"])
    return fake_managers.status_message(prefill, room, state, "why")


def is_done(decode, room: int = ROOM) -> bool:
    return decode.request_status[room] == KVPoll.Success


def aux_message(number=2, slot=3, data=b"a" * 64, announced=None, room=b"7") -> list[bytes]:
    """A metadata row as Mooncake sends it over TCP."""
    announced = struct.pack(">I", len(data) if announced is None else announced)
    header = fake_managers.mooncake.MooncakeKVManager.AUX_DATA_HEADER
    return [header, room, b"%d" % number, b"%d" % slot, announced, data]


def test_valid_messages_to_decode_are_accepted(backend, decode):
    messages = [
        status(backend),
        status(backend, 8, KVPoll.Failed),
        [b"CHUNK_READY", b"7", b"0", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"STAGING_REQ", b"7", b"0", b"4", b"10.0.0.1:1"],
        [b"STAGING_REQ", b"7", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"ABORT_ACK", b"7", b"0", b"1"],
    ]
    for message in messages:
        assert_accepted(decode, message)
    process_messages(decode, *messages)
    assert is_done(decode)


@pytest.mark.parametrize("message", FOREIGN_MESSAGES, ids=repr)
def test_foreign_messages_do_not_stop_the_decode_thread(message, backend, decode):
    process_messages(decode, message, status(backend))
    assert is_done(decode)


STAGING_TO_DECODE = [
    *([b"STAGING_REQ", *[b"1"] * count] for count in range(4)),
    [b"STAGING_REQ", b"x", b"1", b"1", b"10.0.0.1:1"],
    [b"STAGING_REQ", b"7", b"", b"1", b"10.0.0.1:1"],
    [b"STAGING_REQ", b"7", b"1", b"\xff", b"10.0.0.1:1"],
    [b"STAGING_REQ", b"7", b"-5", b"1", b"10.0.0.1:1"],
    [b"STAGING_REQ", b"7", b"2000000", b"1", b"10.0.0.1:1"],
    [b"STAGING_REQ", b"7", b"1", b"1", b"\xff"],
    [b"STAGING_REQ", b"7", b"1", b"1", b"10.0.0.1:1", b"x"],
]
INVALID_DIGESTS = [
    [DIGESTS],
    [DIGESTS, b"7"],
    [DIGESTS, b"7", b"x", b""],
    [DIGESTS, b"\xff", b"0", b""],
    [DIGESTS, b"7", b"0"],
]
INVALID_UNITS = [
    [UNITS],
    [UNITS, b"7", b"0", b"2"],
    [UNITS, b"x", b"0", b"2", encode_units([(0, 2)])],
    [UNITS, b"7", b"0", b"\xff", encode_units([(0, 2)])],
    *([UNITS, b"7", b"0", size, encode_units([(0, 2)])] for size in (b"0", b"-2", b"9" * 9)),
    [UNITS, b"7", b"0", b"2", b""],
    [UNITS, b"7", b"0", b"2", b"\x93\x00\x02\x04"],  # numbers, not pairs of them
]


@pytest.mark.parametrize(
    "message", [*STAGING_TO_DECODE, *INVALID_DIGESTS, *INVALID_UNITS], ids=repr
)
def test_invalid_messages_to_decode_are_dropped(message, backend, decode):
    assert accepted(decode, message) is None
    process_messages(decode, message, status(backend))
    assert is_done(decode)
    assert not decode.arrived_digests and not decode.arrived_units


@pytest.mark.parametrize("message", STAGING_TO_DECODE[:3], ids=repr)
def test_stock_decode_thread_crashes_on_an_invalid_staging_message(message, backend):
    with pytest.raises((IndexError, ValueError)):
        process_messages(decode_rank(backend, kinds=ENGINES), message)


def test_staging_message_before_decode_has_staging_is_dropped(backend):
    """Decode's thread reads before its scheduler has made the staging buffers."""
    message = [b"STAGING_REQ", b"7", b"1", b"1", b"10.0.0.1:1"]
    decode = decode_rank(backend, _staging_handler=None)
    process_messages(decode, message, status(backend))
    assert is_done(decode)
    with pytest.raises(AssertionError):
        process_messages(decode_rank(backend, kinds=ENGINES, _staging_handler=None), message)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbled_messages_do_not_stop_the_decode_thread(backend, data):
    decode = decode_rank(backend)
    good = [
        status(backend, 8),
        status(backend, 8, KVPoll.Failed),
        [b"CHUNK_READY", b"8", b"0", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"STAGING_REQ", b"8", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"ABORT_ACK", b"8", b"0", b"1"],
        [DIGESTS, b"8", b"0", b"digests"],
        units_message(8, 0, 2, [(0, 2), (2, 4)]),
    ]
    if backend == "mooncake":
        good.append(aux_message())
    process_messages(decode, *[data.draw(garbled(message)) for message in good])
    wait_for_room(decode, 9)
    process_messages(decode, status(backend, 9))
    assert is_done(decode, 9)


def test_digests_are_kept_of_open_rooms_only(backend, decode):
    messages = [[DIGESTS, b"7", b"0", b"first"], [DIGESTS, b"7", b"1", b"second"]]
    closed = [DIGESTS, b"99", b"0", b"late"]
    for message in (*messages, closed):
        assert accepted(decode, message) is None
    process_messages(decode, *messages, closed, status(backend))
    assert decode.arrived_digests == {ROOM: {0: b"first", 1: b"second"}}
    assert is_done(decode)


def test_chunks_to_interleave_are_kept_of_open_rooms_only(backend, decode):
    messages = [units_message(ROOM, sender, 2, [(0, 2), (2, 4)]) for sender in (0, 1)]
    closed = units_message(99, 0, 2, [(0, 4)])
    for message in (*messages, closed):
        assert accepted(decode, message) is None
    process_messages(decode, *messages, closed, status(backend))
    assert decode.arrived_units == {ROOM: dict.fromkeys((0, 1), (2, [(0, 2), (2, 4)]))}
    assert is_done(decode)


def test_digests_of_a_room_that_is_being_closed_are_not_kept(decode):
    """They would be compared with what the next request in this room receives."""
    with ThreadPoolExecutor(1) as reader:
        with decode.status_lock:  # the scheduler closes the room
            stored = reader.submit(decode.store_frames, [DIGESTS, b"7", b"0", b"late"])
            wait([stored], 0.2)
            del decode.request_status[ROOM]
            decode.arrived_digests.pop(ROOM, None)
        assert stored.result(5)
    assert not decode.arrived_digests


# Metadata rows over TCP


def aux_bytes(decode) -> bytes:
    return b"".join(rows.tobytes() for rows in decode.kv_args.aux_rows)


def test_aux_message_is_written_to_its_slot():
    decode = decode_rank("mooncake")
    assert accepted(decode, aux_message()) == aux_message()
    process_messages(decode, aux_message())
    assert decode.kv_args.aux_rows[2][3].tobytes() == b"a" * 64
    assert aux_bytes(decode).count(b"a") == 64


ROWS = [
    *(aux_message(number=number) for number in (-1, len(fake_managers.ROWS), 99)),
    *(aux_message(slot=slot) for slot in (-1, fake_managers.SLOTS, 1 << 40)),
    *(aux_message(data=b"a" * length) for length in (63, 65, 0)),
    *(aux_message(announced=length) for length in (65, 0)),
    aux_message()[:5],
    [*aux_message(), b"more"],
    [*aux_message()[:4], b"", b"a" * 64],
    [*aux_message()[:2], b"x", *aux_message()[3:]],
    *(aux_message(room=room) for room in (b"x", b"", b"\xff")),
    aux_message(room=b"8"),  # aborted by now; its slot is another request's
]


@pytest.mark.parametrize("message", ROWS, ids=lambda frames: repr(frames[1:5]))
def test_out_of_bounds_aux_messages_are_dropped(message):
    """The published 0.5.23 writes them wherever their numbers point."""
    decode = decode_rank("mooncake")
    assert accepted(decode, message) is None
    process_messages(decode, message, status("mooncake"))
    assert is_done(decode)
    assert not any(aux_bytes(decode))


# The reader itself


def receive(messages: list, check):
    """A function that returns the next of the messages that `check` lets through."""
    return drop_invalid(iter(messages).__next__, check)


def test_recv_timeout_returns_none():
    """With role switching, the reader must notice that its server stops."""

    def check(frames):
        if frames == [b"bad"]:
            raise ValueError("bad")

    recv = receive([None, [b"bad"], None, [b"good"]], check)
    assert [recv() for _ in range(3)] == [None, None, [b"good"]]


def test_message_with_too_many_frames_is_dropped():
    most, more = [b"x"] * MAX_FRAMES, [b"x"] * (MAX_FRAMES + 1)
    assert receive([more, most], lambda frames: False)() == most


def test_log_of_an_invalid_message_is_short(caplog):
    def check(frames):
        raise ValueError(b"x" * 10_000)

    assert receive([[b"x" * 10_000], None], check)() is None
    assert len(caplog.records) == 1
    assert len(caplog.records[0].getMessage()) < 500
