"""What is no peer's message is dropped: no thread ends, no table grows, no transfer is touched."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from itertools import count

import pytest
import zmq
from fleet import HOST, Fleet, Rank, Servers
from zmq.utils.monitor import recv_monitor_message

pytestmark = pytest.mark.transport

Message = list[bytes]
MUTANTS, BATCH = 10_000, 1000
SRC, DST = [9, 2, 3, 7], [0, 1, 8, 11]
# Rooms that a mutated number does not hit by chance: nothing can tell a stock peer's word from it.
FIRST_ROOM, FIRST_MARK = 20_483_617, 5_906_138_274
MAX_GROWTH = 48 << 20
LIMIT, BIG = 64 << 20, 8 << 20
# With several changes a registration becomes that of a stock peer which nobody knows.
MAX_PEERS = 16
# Places in what `Rank.messages` records, of decode and of prefill.
ABORT, SUCCESS = 2, 0
LARGE = {"session": b"\xff" * BIG, "pointers": b"\1" * BIG}

NUMBERS = [b"-1", b"0", b"4294967296", b"9" * 5000, b"0x10", b"1e3", b"None", b"nan", "٣".encode()]
FOREIGN = [
    [b"GET /health HTTP/1.1\r\nHost: prefill\r\n\r\n"],
    [b""],
    [b"junk"],
    [b"ABORT"],
    [b"None"],
    [b"AUX_DATA"],
    [b"PDS1\0\0\0\0"],
    [b"{}"] * 200,
    [b""] * 33,
    [b"None"] * 13,
    [b"\xff" * (1 << 16)],
]


class Line:
    """One connection to a rank's socket, on which messages keep their order."""

    def __init__(self, rank: Rank):
        self.rank = rank
        self.endpoint = f"tcp://{HOST}:{rank.call('health')['port']}"
        self.sock = self.connected()

    def connected(self) -> zmq.Socket:
        sock = zmq.Context.instance().socket(zmq.PUSH)
        sock.setsockopt(zmq.SNDTIMEO, 30_000)
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(self.endpoint)
        return sock

    def send(self, messages: list[Message]) -> None:
        for message in messages:
            self.sock.send_multipart(message)

    @contextlib.contextmanager
    def sending(self, messages: list[Message]):
        """Send them while the block runs."""
        thread = threading.Thread(target=self.send, args=(messages,))
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def await_read(self, room: int, last_word: Message) -> None:
        """Until the rank has read all that was sent, of which `last_word` ends this room."""
        self.rank.call("expect", room=room)
        self.send([last_word])
        assert self.rank.call("await_end", room=room, seconds=30) == {"state": "ended"}

    def send_oversized(self) -> None:
        """A frame above the limit: the rank hangs up."""
        with self.connected() as sock:
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            sock.send_multipart([b"GuardMessage", b"x" * (LIMIT + 1)])
            assert monitor.poll(10_000), "a frame above the limit was taken"
            recv_monitor_message(monitor)
            sock.disable_monitor()

    def send_foreign(self) -> None:
        """Bytes of a client that does not speak ZeroMQ."""
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\0" + b"\xff" * 512,
            b"\0" * 64,
        ):
            with socket.create_connection((HOST, int(self.endpoint.rsplit(":", 1)[1]))) as client:
                client.sendall(garbage)

    def close(self) -> None:
        self.sock.close()


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
    odd_number,
]


def recorded(rank: Rank, room: int) -> list[Message]:
    answer = rank.call("messages", room=room, pages=DST)
    assert isinstance(answer, list), answer
    return [[bytes.fromhex(frame) for frame in message] for message in answer]


@contextlib.contextmanager
def unharmed(servers: Servers, line: Line):
    """The block leaves the rank as it was, and then the two servers still work together."""
    before = line.rank.call("health")
    yield
    assert_right(servers)
    after = line.rank.call("health")
    assert not set(before["threads"]) - set(after["threads"])
    assert after["peers"] <= MAX_PEERS
    assert after["peak"] - before["peak"] < MAX_GROWTH
    for kept in servers.kept():
        assert set(kept.values()) == {0}, kept


def assert_right(servers: Servers) -> None:
    outcome = servers.request(SRC, DST)
    assert outcome.state == "right", outcome


@pytest.fixture()
def attacked(serve):
    """A function that runs a fleet, makes its two ranks meet, and opens a line to one of them."""

    @contextlib.contextmanager
    def run(backend: str, side: str, engine: str = "patched"):
        with serve(Fleet(backend=backend, v_width=4), engine, engine) as servers:
            servers._rooms = count(FIRST_ROOM)
            assert_right(servers)
            with contextlib.closing(Line(getattr(servers, side)[0])) as line:
                yield servers, line

    return run


def attack(servers, line, source: Rank, kinds: slice, last_word: int, seed: int) -> None:
    """Mutants of the source's messages for the very room that is served meanwhile."""
    rng = random.Random(seed)
    for batch in range(MUTANTS // BATCH):
        room = FIRST_ROOM + 1 + batch
        messages = recorded(source, room)[kinds]
        mutants = [mutant(rng, messages) for _ in range(BATCH)]
        with line.sending([m for m in mutants if not is_stock_word(m, room)]):
            assert_right(servers)
        await_read(line, source, batch, last_word)


def is_stock_word(message: Message, room: int) -> bool:
    """What a stock prefill rank says of a room bears no seal, and is believed."""
    return len(message) == 3 and message[0] == b"%d" % room


def await_read(line: Line, source: Rank, mark: int, last_word: int) -> None:
    line.await_read(FIRST_MARK + mark, recorded(source, FIRST_MARK + mark)[last_word])


@pytest.mark.parametrize("backend", ["nixl", "mooncake", "ascend"])
def test_mutants_of_decodes_messages(attacked, backend):
    """Registrations, rooms and ABORTs that bear a live decode rank's name."""
    with attacked(backend, "prefill") as (servers, line), unharmed(servers, line):
        attack(servers, line, servers.decode[0], slice(0, 3), ABORT, seed=1)
        line.send_oversized()
        line.send_foreign()


@pytest.mark.parametrize("backend", ["mooncake", "ascend"])
def test_mutants_of_prefills_messages(attacked, backend):
    """How a room ended; then metadata, which bear no seal, between requests."""
    with attacked(backend, "decode") as (servers, line), unharmed(servers, line):
        prefill = servers.prefill[0]
        attack(servers, line, prefill, slice(0, 2), SUCCESS, seed=2)
        metadata = recorded(prefill, FIRST_ROOM)[2:]
        rng = random.Random(3)
        line.send([mutant(rng, metadata) for _ in range(MUTANTS)])
        await_read(line, prefill, MUTANTS, SUCCESS)
        line.send_oversized()
        line.send_foreign()


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_one_message_ends_stocks_thread(attacked, backend):
    with attacked(backend, "prefill", "stock") as (servers, line):
        before = set(line.rank.call("health")["threads"])
        line.send([[b"junk"]])
        deadline = time.monotonic() + 10
        while before <= set(line.rank.call("health")["threads"]):
            assert time.monotonic() < deadline, before
            time.sleep(0.01)
        outcome = servers.request(SRC, DST, seconds=3)
        assert outcome.state == "hang", outcome


def as_stocks(servers: Servers, room: int, **changes: bytes) -> tuple[Message, Message]:
    """A registration and an open room as a stock decode rank would send them, with changes."""
    guard = int(servers.fleet.backend == "nixl")
    positions = {"session": 3 + guard, "metadata": 4 + guard, "pointers": 4 + 2 * guard}
    registration, opened, _ = recorded(servers.decode[0], room)
    registration, opened = registration[:-2], opened[:-1]
    for name, frame in changes.items():
        registration[positions[name]] = frame
    opened[positions["session"]] = registration[positions["session"]]
    return registration, opened


@pytest.mark.parametrize("frame", LARGE)
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_large_frame_is_neither_kept_nor_logged(attacked, nursery, backend, frame):
    log = nursery("patched").log
    with attacked(backend, "prefill") as (servers, line), unharmed(servers, line):
        before = log.stat().st_size
        line.send(as_stocks(servers, FIRST_MARK, **{"session": b"10.0.0.1:2", frame: LARGE[frame]}))
        await_read(line, servers.decode[0], 1, ABORT)
        assert log.stat().st_size - before < 1 << 20


def test_a_live_agents_metadata_under_another_name(attacked):
    """NIXL knows an agent by the name in them: where it cannot load them, it forgets that agent."""
    with attacked("nixl", "prefill") as (servers, line), unharmed(servers, line):
        metadata = recorded(servers.decode[0], FIRST_MARK)[0][5]
        line.send(as_stocks(servers, FIRST_MARK, session=b"another", metadata=metadata[:-20])[:1])
        await_read(line, servers.decode[0], 1, ABORT)


def test_a_session_that_is_no_address(attacked):
    """Its port is read in the scheduler's thread when the room is sent."""
    with attacked("mooncake", "prefill") as (servers, line), unharmed(servers, line):
        line.send(as_stocks(servers, FIRST_ROOM + 1, session=b"nowhere"))
        await_read(line, servers.decode[0], 1, ABORT)
