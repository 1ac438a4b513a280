"""What a peer's message says wrongly harms the request it is about, and nothing else.

Of messages with mutations no thread ends, no process dies, no write leaves the peer's pools. At
worst their own request fails or gets wrong bytes; with a registration those of that decode rank,
until its own is read again.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from itertools import count

import numpy as np
import pytest
from fleet import Fleet, Servers, Side
from lines import DST, FIRST_MARK, Line, Message, await_read, recorded
from of_release import IS_DEFAULT, IS_LATER, as_stocks
from transfer_checks import HANG_SECONDS, few

from pd_harness.waiting import awaited

pytestmark = pytest.mark.transport

BATCH, BATCHES = 100, 40
MET = 30 if IS_LATER else 150
BACKENDS = ["nixl", "mooncake", "ascend"]
# Over which prefill says how a room ended; 0.5.9's NIXL notifies.
SAYING = BACKENDS if IS_LATER else BACKENDS[1:]
NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(1200)]
MUTANTS = [BATCH if IS_LATER else 1500]
if IS_DEFAULT:
    MUTANTS.append(pytest.param(10_000, marks=NIGHTLY))
SRC = [9, 2, 3, 7]
# Far apart, so that a mutated number does not hit another room by chance.
FIRST_ROOM, OTHER_ROOM = 20_483_617, 731_046_852_095
RIGHT_ROOM = 1_570_629_301  # and those that follow are not attacked
# Else a side waits for minutes for what the other was told wrongly.
PATIENCE = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "5",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "5",
    # Some garbled messages end a room on one side alone, and decode waits for the other.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}
MAX_GROWTH = 48 << 20
BIG = 8 << 20
# Places in what `Rank.messages` records, of decode and of prefill.
REGISTRATION, NOT_OPENED = 0, 3
OF_ROOMS = slice(1, 4)
SUCCESS = 0
LARGE = {"session": b"\xff" * BIG, "pointers": b"\1" * BIG}

NUMBERS = [b"-1", b"0", b"4294967296", b"9" * 5000, b"0x10", b"1e3", b"None", b"nan", "٣".encode()]
FOREIGN = [
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


def mutant(rng: random.Random, messages: list[Message]) -> Message:
    """One of the messages with one to three changes, or what no peer would send."""
    if rng.random() < 0.02:
        return list(rng.choice(FOREIGN))
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
    """Of one of a frame's pointers, if it may hold some: a little, or to where nothing is."""
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
def unharmed(servers: Servers, line: Line, rooms: int = 0, reasons: int = 0):
    """The block leaves the rank as it was, and then the two servers still work together.

    Prefill may keep as many `rooms`, which wait for their requests, and decode as many `reasons`:
    0.5.23's decode keeps why a room failed, for ever, if it is said of one that is just over.
    """
    (prefill,), (decode,) = servers.prefill, servers.decode
    before = line.rank.call("health")
    prefill.call("note_writes")
    yield
    assert_right(servers)
    after = line.rank.call("health")
    assert not set(before["threads"]) - set(after["threads"])
    assert after["peers"] <= before["peers"] + rooms
    assert after["peak"] - before["peak"] < MAX_GROWTH
    kept = decode.call("kept")
    assert kept.pop("failure_records", 0) <= reasons, kept
    assert set(kept.values()) == {0}, kept
    kept = prefill.call("kept")
    assert max(kept.values()) <= rooms, kept
    written = prefill.call("written_outside", ranges=decode.call("registered"))
    assert written["done"] and not written["outside"], written


def assert_right(servers: Servers) -> None:
    outcome = servers.request(SRC, DST)
    assert outcome.state == "right", outcome


@pytest.fixture()
def attacked(serve):
    """A function that runs a fleet, makes its two ranks meet, and opens a line to one of them."""

    @contextlib.contextmanager
    def run(backend: str, side: str, engine: str = "patched"):
        each = Side(environment=PATIENCE if engine == "patched" else {})
        fleet = Fleet(each, each, backend=backend, v_width=4)
        with serve(fleet, engine, engine) as servers:
            servers._rooms = count(RIGHT_ROOM)
            assert_right(servers)
            with contextlib.closing(Line(getattr(servers, side)[0])) as line:
                yield servers, line

    return run


def batches(mutants: int, seed: int):
    """The number of each batch, the room that is served meanwhile, and a function that draws it.

    That takes messages, and gives mutants of them. There are at most `BATCHES`: the request of one
    often ends with a time-out.
    """
    rng = random.Random(seed)
    size = max(BATCH, mutants // BATCHES)
    for number in range(mutants // size):
        yield number, FIRST_ROOM + number, lambda messages: drawn(rng, messages, size)


def drawn(rng: random.Random, messages: list[Message], size: int = BATCH) -> list[Message]:
    return [mutant(rng, messages) for _ in range(size)]


def request_under_attack(servers: Servers, line: Line, room: int, mutants: list[Message]) -> None:
    """It ends, one way or another; or the metadata goes to the slot that a mutant names."""
    others, servers._rooms = servers._rooms, count(room)
    with line.sending(mutants):
        outcome = servers.request(SRC, DST)
    servers._rooms = others
    states = {answer["state"] for answer in (*outcome.prefill, *outcome.decode)}
    assert states <= {"success", "right", "wrong", "no metadata", "failed"}, outcome


def say_what_is_none(line: Line) -> None:
    """Later releases set no limit on a frame."""
    if not IS_LATER:
        line.send_oversized()
    line.send_foreign()


@pytest.mark.parametrize("mutants", MUTANTS)
@pytest.mark.parametrize("backend", few(BACKENDS, "nixl", "mooncake"))
def test_mutants_of_decodes_messages(attacked, backend, mutants):
    """Registrations, rooms and ABORTs that bear a live decode rank's name and a live room."""
    with attacked(backend, "prefill") as (servers, line), unharmed(servers, line, mutants):
        (decode,) = servers.decode
        for number, room, draw in batches(mutants, seed=1):
            messages = recorded(decode, room)
            request_under_attack(servers, line, room, draw(messages))
            line.send([messages[REGISTRATION]])
            await_read(line, decode, number, NOT_OPENED)
            decode.call("accept")
            assert_right(servers)
        say_what_is_none(line)


@pytest.mark.parametrize("backend", few(BACKENDS, "nixl"))
def test_prefill_acts_on_each_mutant(attacked, backend):
    """It computes and sends for a mutated registration or room; the next request is right."""
    ends = Counter()
    with attacked(backend, "prefill") as (servers, line), unharmed(servers, line, MET):
        (prefill,), (decode,) = servers.prefill, servers.decode
        rng, kept = random.Random(5), 0
        for number in range(MET):
            room = FIRST_ROOM + number
            registration, opened, *_ = messages = recorded(decode, room)
            ask = [registration, opened]
            i = rng.randrange(2)
            ask[i] = mutant(rng, ask[i : i + 1])
            line.send(ask)
            await_read(line, decode, number, NOT_OPENED)
            end = {"state": "not opened"}
            if prefill.call("kept")["transfer_infos"] > kept:
                end = prefill.call("send", room=room, pages=SRC, chunks=[len(SRC)], seconds=1)
            assert end["state"] in ("not opened", "success", "failed", "hang"), (ask, end)
            ends[end["state"]] += 1
            line.send([registration, messages[NOT_OPENED]])
            await_read(line, decode, number, NOT_OPENED)
            assert decode.call("accept") == {"state": "accepted"}, (ask, end)
            assert_right(servers)
            kept = prefill.call("kept")["transfer_infos"]
    assert ends["success"] and ends["failed"]


@pytest.mark.parametrize("backend", few(BACKENDS, "mooncake"))
def test_mutants_of_another_requests_messages(attacked, backend):
    """Those that open and give up a room harm no other room, though decode's name is theirs."""
    with attacked(backend, "prefill") as (servers, line), unharmed(servers, line, 5 * BATCH):
        (decode,) = servers.decode
        messages = recorded(decode, OTHER_ROOM)[OF_ROOMS]
        for number, _, draw in batches(5 * BATCH, seed=4):
            with line.sending(draw(messages)):
                assert_right(servers)
            await_read(line, decode, number, NOT_OPENED)


@pytest.mark.parametrize("mutants", MUTANTS)
@pytest.mark.parametrize("backend", few(SAYING, "nixl", "mooncake"))
def test_mutants_of_prefills_messages(attacked, backend, mutants):
    """How a room ended; then metadata, of whatever slot, between requests."""
    reasons = BATCHES if IS_LATER else 0
    with attacked(backend, "decode") as (servers, line), unharmed(servers, line, reasons=reasons):
        prefill = servers.prefill[0]
        for number, room, draw in batches(mutants, seed=2):
            messages = recorded(prefill, room)[:2]
            request_under_attack(servers, line, room, draw(messages))
            await_read(line, prefill, number, SUCCESS)
            servers.decode[0].call("accept")
            assert_right(servers)
        metadata = recorded(prefill, FIRST_ROOM)[2:]
        rng = random.Random(3)
        line.send([mutant(rng, metadata) for _ in range(mutants) if metadata])
        await_read(line, prefill, mutants, SUCCESS)
        say_what_is_none(line)


@pytest.mark.parametrize("backend", few(["nixl", "mooncake"], "nixl"))
def test_one_message_ends_stocks_thread(attacked, backend):
    with attacked(backend, "prefill", "stock") as (servers, line):
        before = set(line.rank.call("health")["threads"])
        line.send([[b"junk"]])
        assert awaited(lambda: before - set(line.rank.call("health")["threads"]), 10), before
        outcome = servers.request(SRC, DST, seconds=HANG_SECONDS)
        assert outcome.state == "hang", outcome


def asked_as_stock(servers: Servers, room: int, **changes: bytes) -> tuple[Message, Message]:
    """A registration and an open room as a stock decode rank would send them, with changes."""
    guard = int(servers.fleet.backend == "nixl")
    positions = {"session": 3 + guard, "metadata": 4 + guard, "pointers": 4 + 2 * guard}
    registration, opened, *_ = recorded(servers.decode[0], room)
    registration = as_stocks(registration)
    for name, frame in changes.items():
        registration[positions[name]] = frame
    opened[positions["session"]] = registration[positions["session"]]
    return registration, opened


@pytest.mark.parametrize("frame", LARGE)
@pytest.mark.parametrize("backend", few(["nixl", "mooncake"], "mooncake"))
def test_a_large_frame_is_neither_kept_nor_logged(attacked, fork_server, backend, frame):
    log = fork_server("patched").log
    with attacked(backend, "prefill") as (servers, line), unharmed(servers, line):
        before = log.stat().st_size
        changes = {"session": b"10.0.0.1:2", frame: LARGE[frame]}
        registration, opened = asked_as_stock(servers, FIRST_MARK, **changes)
        # Later ones keep a room of a rank that is not registered, until its request has failed.
        line.send([registration] if IS_LATER else [registration, opened])
        await_read(line, servers.decode[0], 1, NOT_OPENED)
        assert log.stat().st_size - before < 1 << 20


def test_a_live_agents_metadata_under_another_name(attacked):
    """NIXL knows an agent by the name in them: where it cannot load them, it forgets that agent."""
    with attacked("nixl", "prefill") as (servers, line), unharmed(servers, line):
        metadata = recorded(servers.decode[0], FIRST_MARK)[0][5]
        line.send(
            asked_as_stock(servers, FIRST_MARK, session=b"another", metadata=metadata[:-20])[:1]
        )
        await_read(line, servers.decode[0], 1, NOT_OPENED)


def test_a_session_that_is_no_address(attacked):
    """Its port is read in the scheduler's thread when the room is sent."""
    with attacked("mooncake", "prefill") as (servers, line), unharmed(servers, line):
        line.send(asked_as_stock(servers, RIGHT_ROOM + 1, session=b"nowhere"))
        await_read(line, servers.decode[0], 1, NOT_OPENED)
