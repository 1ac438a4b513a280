"""Messages that cannot be read are dropped; no thread ends of them, and the next one is read.

The engine's own threads read here: what leaves one of them would have ended it.
"""

import struct
from types import SimpleNamespace

import managers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from managers import BACKENDS, DECODE, ENGINES, PATCHED, PEER, PREFILL
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.staging_handler import PrefillStagingContext
from sglang.srt.disaggregation.kv_layout import Heads
from sglang.srt.disaggregation.pd.comparing import DIGESTS
from sglang.srt.disaggregation.pd.readers import MAX_CHUNKS, MAX_FRAMES, checked

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM = 7
MODELS = {
    "latents": managers.latents((64 * 132, 0, 64 * 132, 0)),
    "heads": managers.heads(Heads(0, 2, 2), (0, 1), 256),
}
GUARD = {"mooncake": [], "nixl": [managers.nixl.GUARD]}
NUMBERS = [b"-1", b"0", b"x", b"", b"\xff", b"1e3", b"9" * 30]
FOREIGN = [[b"hello"], [b""], [b"\xff\xfe"], [b"1", b"2", b"3", b"4"], [b""] * 4, [b"x"] * 65]


def prefill_rank(backend, kinds=PATCHED, model="latents", **more):
    """One that waits for room 7, with staging buffers."""
    staging = {"enable_staging": True, "_staging_ctx": PrefillStagingContext()}
    prefill = managers.rank(backend, MODELS[model], kinds=kinds, **{**staging, **more})
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    return prefill


def decode_rank(backend, kinds=PATCHED, **more):
    """One that waits for room 7, with staging buffers."""
    handler = SimpleNamespace(_room_to_decode_req={}, handle_chunk_arrived=lambda *_: None)
    handler.is_staging_room = lambda room: False
    staging = {"enable_staging": True, "_staging_handler": handler}
    decode = managers.rank(backend, MODELS["latents"], DECODE, kinds=kinds, **{**staging, **more})
    decode.request_status[ROOM] = KVPoll.WaitingForInput
    decode.prefill_response_tracker[ROOM] = set()
    decode.required_prefill_response_num_table[ROOM] = 1
    return decode


def messages_to_prefill(backend, model="latents") -> tuple[list[bytes], list[bytes]]:
    """A registration, and a request of room 7."""
    decode = managers.rank(backend, MODELS[model], DECODE)
    ask = managers.request(decode, ROOM, range(4), state_indices=[[1, 2]])
    return managers.registration(decode), ask


def is_asked(prefill) -> bool:
    return prefill.request_status[ROOM] == KVPoll.WaitingForInput


def passed(manager, message: list[bytes]) -> list[bytes] | None:
    """What the engine's thread is given of it; None where it is dropped."""
    role = "prefill" if manager.disaggregation_mode == PREFILL else "decode"
    recv = managers.Socket([list(message), [b"END"]]).recv_multipart
    check = getattr(manager, f"_check_{role}_message")
    got = checked(recv, lambda frames: frames != [b"END"] and check(frames))()
    return None if got == [b"END"] else got


# To prefill


@backends
def test_good_messages_to_prefill_pass(backend):
    prefill = prefill_rank(backend)
    registration, ask = messages_to_prefill(backend)
    staging = [
        [b"WATERMARK", b"1", b"64", PEER[backend].encode()],
        [b"WATERMARK", b"1", b"64"],
        [b"STAGING_RSP", b"7", b"3", b"0", b"1", b"64", PEER[backend].encode()],
        [b"STAGING_RSP", b"7", b"3", b"-1", b"0", b"-1", PEER[backend].encode()],
        [b"STAGING_RSP", b"7", b"%d" % (MAX_CHUNKS - 1), b"0", b"1", b"64", b"x"],
    ]
    aborts = [[b"ABORT", b"7"], [b"ABORT", b"7", b"127.0.0.1", b"5555", b"1"]]
    for message in (registration, registration[:-1], ask, *staging, *aborts):
        assert passed(prefill, message) == message
    managers.read(prefill, registration, ask, *staging[:3])
    assert is_asked(prefill)
    assert managers.known(prefill).plan is not None
    assert prefill._staging_ctx.remote_watermarks
    assert prefill.transfer_infos[ROOM][PEER[backend]].staging.offsets == [-1, -1, -1, 0]


@backends
@pytest.mark.parametrize("message", FOREIGN, ids=repr)
def test_foreign_messages_to_prefill_are_dropped(backend, message):
    prefill = prefill_rank(backend)
    assert passed(prefill, message) is None
    managers.read(prefill, message, *messages_to_prefill(backend))
    assert is_asked(prefill)
    assert list(prefill.transfer_infos) == [ROOM]


@backends
@pytest.mark.parametrize("message", FOREIGN[:2], ids=repr)
def test_stock_threads_end_of_foreign_messages(backend, message):
    with pytest.raises((IndexError, AssertionError)):
        managers.read(prefill_rank(backend, ENGINES), message)


@backends
@pytest.mark.parametrize("model", MODELS)
def test_registrations_that_are_cut(backend, model):
    """Of few frames they cannot be read. With more it is one of an older release."""
    registration, ask = messages_to_prefill(backend, model)
    least = {"mooncake": 10, "nixl": 13}[backend]
    for count in range(1, len(registration)):
        prefill = prefill_rank(backend, model=model)
        is_read = passed(prefill, registration[:count]) is not None
        assert is_read == (count >= least)
        managers.read(prefill, registration[:count], ask)
        assert is_asked(prefill)
        assert list(prefill.decode_kv_args_table) == [PEER[backend]] * is_read


@backends
def test_requests_that_are_cut(backend):
    registration, ask = messages_to_prefill(backend)
    least = {"mooncake": 8, "nixl": 8}[backend]
    for count in range(1, len(ask)):
        prefill = prefill_rank(backend)
        assert (passed(prefill, ask[:count]) is not None) == (count >= least)
        managers.read(prefill, ask[:count], registration, ask)
        assert is_asked(prefill)


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


@backends
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_garbled_message_ends_prefills_thread(backend, model, data):
    """One of another decode rank may be read as such; the next good one is, in any case."""
    prefill = prefill_rank(backend, model=model)
    good = messages_to_prefill(backend, model)
    bad = [data.draw(garbled(message)) for message in good]
    other = 8  # the good request is of a room that no garbled one is likely to have
    managers.read(prefill, *bad)
    prefill.request_status[other] = KVPoll.Bootstrapping
    prefill.transfer_infos.pop(other, None)
    decode = managers.rank(backend, MODELS[model], DECODE)
    managers.read(prefill, good[0], managers.request(decode, other, range(4)))
    assert prefill.request_status[other] == KVPoll.WaitingForInput
    assert PEER[backend] in prefill.decode_kv_args_table


# Which frame has what, from the first that both backends have.
REQUEST = {
    "mooncake": {"room": 0, "slot": 5, "ranks": 7},
    "nixl": {"room": 1, "slot": 6, "ranks": 7},
}


@backends
@pytest.mark.parametrize("frame", ["room", "slot", "ranks"])
@pytest.mark.parametrize("number", [b"-1", b"-7", b"x", b"", b"\xff"])
def test_requests_with_numbers_that_none_has(backend, frame, number):
    prefill = prefill_rank(backend)
    _, ask = messages_to_prefill(backend)
    bad = list(ask)
    bad[REQUEST[backend][frame]] = number
    assert passed(prefill, bad) is None
    managers.read(prefill, bad, ask)
    assert is_asked(prefill)
    assert list(prefill.transfer_infos) == [ROOM]


@backends
@pytest.mark.parametrize("pages, state", [([0, -1], [[1]]), ([0, 1], [[2], [-3]])])
def test_requests_for_pages_that_none_has(backend, pages, state):
    prefill = prefill_rank(backend)
    decode = managers.rank(backend, MODELS["latents"], DECODE)
    bad = managers.request(decode, ROOM, pages, state_indices=state)
    assert passed(prefill, bad) is None
    managers.read(prefill, bad)
    assert not prefill.transfer_infos


@backends
def test_a_request_of_a_dummy_rank_passes(backend):
    """It has neither pages nor a slot."""
    decode = managers.rank(backend, MODELS["latents"], DECODE)
    message = decode.build_receiver_metadata_message(
        bootstrap_room=ROOM,
        required_dst_info_num=1,
        kv_indices=managers.np.array([], managers.np.int32),
        aux_index=0,
        state_indices=None,
        decode_prefix_len=0,
        is_dummy=True,
    )
    prefill = prefill_rank(backend)
    managers.read(prefill, message)
    assert is_asked(prefill)
    assert prefill.transfer_infos[ROOM][PEER[backend]].is_dummy


@pytest.mark.parametrize(
    "session",
    [b"", b"host", b"host:", b":1", b"host:-1", b"host:x", b"host: 1", b"h\xc3\xb6st:1"]
    + [b"host:1_", b"host:\xd9\xa1", b"x" * 300 + b":1"],
)
def test_a_mooncake_session_that_is_no_address(session):
    """Its port says which queue the room's chunks go to, in the scheduler."""
    prefill = prefill_rank("mooncake")
    for message in messages_to_prefill("mooncake"):
        bad = [*message[:3], session, *message[4:]]
        assert passed(prefill, bad) is None
        managers.read(prefill, bad)
    assert not prefill.transfer_infos and not prefill.decode_kv_args_table


@pytest.mark.parametrize(
    "session", [b"10.0.0.1:1", b"[::1]:65535", b"node-7.local:12001", b"127.0.0.1:17217_10565"]
)
def test_sessions_that_are(session):
    prefill = prefill_rank("mooncake")
    _, ask = messages_to_prefill("mooncake")
    managers.read(prefill, [*ask[:3], session, *ask[4:]])
    assert list(prefill.transfer_infos[ROOM]) == [session.decode()]


@pytest.mark.parametrize("name", [b"", b"\xff", b"x" * 300])
def test_a_nixl_agent_without_a_name(name):
    prefill = prefill_rank("nixl")
    for message in messages_to_prefill("nixl"):
        bad = [*message[:4], name, *message[5:]]
        assert passed(prefill, bad) is None
        managers.read(prefill, bad)
    assert not prefill.transfer_infos and not prefill.decode_kv_args_table


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


@backends
@pytest.mark.parametrize("message", STAGING_TO_PREFILL, ids=repr)
def test_bad_words_on_staging_buffers_to_prefill(backend, message):
    prefill = prefill_rank(backend)
    registration, ask = messages_to_prefill(backend)
    assert passed(prefill, message) is None
    managers.read(prefill, registration, ask, message, message)
    assert prefill.transfer_infos[ROOM][PEER[backend]].staging is None
    assert not prefill._staging_ctx.remote_watermarks


@backends
@pytest.mark.parametrize("message", STAGING_TO_PREFILL[:5], ids=repr)
def test_stock_threads_end_of_them(backend, message):
    with pytest.raises((IndexError, ValueError)):
        managers.read(prefill_rank(backend, ENGINES), message)


@backends
@pytest.mark.parametrize("word", [b"WATERMARK", b"STAGING_RSP"])
def test_words_on_staging_buffers_where_there_are_none(backend, word):
    """Stock Mooncake's thread ends of them."""
    prefill = prefill_rank(backend, enable_staging=False, _staging_ctx=None)
    good = messages_to_prefill(backend)
    managers.read(prefill, [word, b"7", b"1", b"0", b"0", b"0", b"peer"], *good)
    assert is_asked(prefill)


# To decode


def status(backend, room: int = ROOM, state: int = KVPoll.Success) -> list[bytes]:
    """Prefill's word that a room is done."""
    prefill = managers.rank(backend, MODELS["latents"])
    prefill.send_kv_status_message(
        targets=[managers.ENDPOINT], bootstrap_room=room, status=state, failure_reason="why"
    )
    ((_, message),) = prefill.told
    return message


def is_done(decode) -> bool:
    return decode.request_status[ROOM] == KVPoll.Success


def row(number=2, slot=3, data=b"a" * 64, announced=None, room=b"7") -> list[bytes]:
    """A metadata row over Mooncake's TCP."""
    announced = struct.pack(">I", len(data) if announced is None else announced)
    header = managers.mooncake.MooncakeKVManager.AUX_DATA_HEADER
    return [header, room, b"%d" % number, b"%d" % slot, announced, data]


@backends
def test_good_messages_to_decode_pass(backend):
    decode = decode_rank(backend)
    messages = [
        status(backend),
        status(backend, 8, KVPoll.Failed),
        [b"CHUNK_READY", b"7", b"0", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"STAGING_REQ", b"7", b"0", b"4", b"10.0.0.1:1"],
        [b"STAGING_REQ", b"7", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"ABORT_ACK", b"7", b"0", b"1"],
    ]
    for message in messages:
        assert passed(decode, message) == message
    managers.read(decode, *messages)
    assert is_done(decode)


@backends
@pytest.mark.parametrize("message", FOREIGN, ids=repr)
def test_foreign_messages_end_no_thread_of_decode(backend, message):
    decode = decode_rank(backend)
    managers.read(decode, message, status(backend))
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


@backends
@pytest.mark.parametrize("message", STAGING_TO_DECODE, ids=repr)
def test_bad_words_on_staging_buffers_to_decode(backend, message):
    decode = decode_rank(backend)
    assert passed(decode, message) is None
    managers.read(decode, message, status(backend))
    assert is_done(decode)


@backends
@pytest.mark.parametrize("message", STAGING_TO_DECODE[:3], ids=repr)
def test_stock_decode_ends_of_them(backend, message):
    with pytest.raises((IndexError, ValueError)):
        managers.read(decode_rank(backend, ENGINES), message)


@backends
def test_words_on_staging_buffers_before_decode_has_any(backend):
    """Its thread reads before its scheduler has made them."""
    message = [b"STAGING_REQ", b"7", b"1", b"1", b"10.0.0.1:1"]
    managers.read(decode := decode_rank(backend, _staging_handler=None), message, status(backend))
    assert is_done(decode)
    with pytest.raises(AssertionError):
        managers.read(decode_rank(backend, ENGINES, _staging_handler=None), message)


@backends
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_garbled_message_ends_decodes_thread(backend, data):
    decode = decode_rank(backend)
    good = [
        status(backend, 8),
        status(backend, 8, KVPoll.Failed),
        [b"CHUNK_READY", b"8", b"0", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"STAGING_REQ", b"8", b"0", b"4", b"10.0.0.1:1", b"0"],
        [b"ABORT_ACK", b"8", b"0", b"1"],
        [DIGESTS, b"8", b"0", b"digests"],
    ]
    if backend == "mooncake":
        good.append(row())
    managers.read(decode, *[data.draw(garbled(message)) for message in good])
    decode.request_status[9] = KVPoll.WaitingForInput
    decode.prefill_response_tracker[9] = set()
    decode.required_prefill_response_num_table[9] = 1
    managers.read(decode, status(backend, 9))
    assert decode.request_status[9] == KVPoll.Success


# Metadata rows over TCP


def held(decode) -> bytes:
    return b"".join(rows.tobytes() for rows in decode.kv_args.aux_rows)


def test_a_row_arrives_in_its_slot():
    decode = decode_rank("mooncake")
    assert passed(decode, row()) == row()
    managers.read(decode, row())
    assert decode.kv_args.aux_rows[2][3].tobytes() == b"a" * 64
    assert held(decode).count(b"a") == 64


ROWS = [
    *(row(number=number) for number in (-1, len(managers.ROWS), 99)),
    *(row(slot=slot) for slot in (-1, managers.SLOTS, 1 << 40)),
    row(data=b"a" * 63),
    row(data=b"a" * 65),
    row(data=b""),
    row(announced=65),
    row(announced=0),
    row()[:5],
    [*row(), b"more"],
    [*row()[:4], b"", b"a" * 64],
    [*row()[:2], b"x", *row()[3:]],
    *(row(room=room) for room in (b"x", b"", b"\xff")),
    row(room=b"8"),  # given up by now, and its slot is another request's
]


@pytest.mark.parametrize("message", ROWS, ids=lambda frames: repr(frames[1:5]))
def test_rows_that_have_no_place(message):
    """In 0.5.23 as it is published they are written wherever the numbers say."""
    decode = decode_rank("mooncake")
    assert passed(decode, message) is None
    managers.read(decode, message, status("mooncake"))
    assert is_done(decode)
    assert not any(held(decode))


# Digests


@backends
def test_digests_are_taken_of_rooms_that_are_open(backend):
    decode = decode_rank(backend)
    messages = [[DIGESTS, b"7", b"0", b"first"], [DIGESTS, b"7", b"1", b"second"]]
    closed = [DIGESTS, b"99", b"0", b"late"]
    for message in (*messages, closed):
        assert passed(decode, message) is None
    managers.read(decode, *messages, closed, status(backend))
    assert decode.arrived_digests == {ROOM: {0: b"first", 1: b"second"}}
    assert is_done(decode)


UNREADABLE = ([], [b"7"], [b"7", b"x", b""], [b"\xff", b"0", b""], [b"7", b"0"])


@backends
@pytest.mark.parametrize("message", [[DIGESTS, *rest] for rest in UNREADABLE], ids=repr)
def test_digests_that_cannot_be_read(backend, message):
    decode = decode_rank(backend)
    assert passed(decode, message) is None
    managers.read(decode, message, status(backend))
    assert is_done(decode)
    assert not decode.arrived_digests


# The reader itself


def test_a_reader_that_waits_for_a_while_gives_nothing():
    """As with role switching, where it must see that its server ends."""
    given_ = iter([None, [b"bad"], None, [b"good"]])

    def check(frames):
        if frames == [b"bad"]:
            raise ValueError("bad")

    recv = checked(lambda: next(given_), check)
    assert [recv() for _ in range(3)] == [None, None, [b"good"]]


def test_many_frames_are_too_many():
    most, more = [b"x"] * MAX_FRAMES, [b"x"] * (MAX_FRAMES + 1)
    given_ = iter([more, most])
    assert checked(lambda: next(given_), lambda frames: False)() == most


def test_what_is_logged_is_short(caplog):
    def check(frames):
        raise ValueError(b"x" * 10_000)

    given_ = iter([[b"x" * 10_000], None])
    assert checked(lambda: next(given_), check)() is None
    assert len(caplog.records) == 1
    assert len(caplog.records[0].getMessage()) < 500
