"""Messages that nobody of this release sends are dropped, and the next request is served.

0.5.9 has `test_fuzz` for it.
"""

import pytest
from fleet import Fleet
from lines import Line
from of_release import IS_LATER
from transfer_checks import BACKENDS, HANG_SECONDS, PAGES, assert_right

from pd_harness.waiting import awaited

pytestmark = [
    pytest.mark.transport,
    pytest.mark.skipif(not IS_LATER, reason="0.5.9 has its own"),
    pytest.mark.parametrize("backend", BACKENDS),
]

GUARD = b"NixlMsgGuard"
ENDS_STOCK = {"nixl": [b"hello"], "mooncake": [b"\xff\xfe"]}
# With more frames than are looked at: its end in the log says that all before has been read.
LAST_WORD = [b"x"] * 65
BAD = [
    [b""],
    [b"hello"],
    [b"\xff\xfe"],
    [b"\xff" * 20] * 4,
    [b"ABORT"],
    [b"ABORT", b"x", b"y", b"z"],
    [b"ABORT", b"7", b"127.0.0.1", b"no port"],
    [b"ABORT_ACK", b"x"],
    [b"WATERMARK"],
    [b"WATERMARK", b"x", b"y", b"z"],
    [b"STAGING_RSP", b"1"],
    [b"STAGING_REQ", b"1"],
    [b"CHUNK_READY", b"x"],
    [b"BOOTSTRAP", b"x"],
    [b"KV_STATUS", b"x", b"y", b"z"],
    [b"AUX_DATA", b"1"],
    [b"AUX_DATA", b"1", b"99", b"0", b"\0\0\0\4", b"1234"],
    [b"AUX_DATA", b"1", b"0", b"99", b"\0\0\0\4", b"1234"],
    [b"AUX_DATA", b"1", b"0", b"-1", b"\0\0\0\4", b"1234"],
    [b"PD_DIGESTS", b"x"],
    [b"None"],
    [b"None", b"127.0.0.1", b"1", b"127.0.0.1:1", *[b"x"] * 17],
    [b"5", b"127.0.0.1", b"1", b"127.0.0.1:1", b"\0" * 3, b"0", b"", b"1"],
    [b"5", b"127.0.0.1", b"1", b"no session", b"\0" * 4, b"0", b"", b"1"],
    [b"-5", b"127.0.0.1", b"1", b"127.0.0.1:1", b"\0" * 4, b"0", b"", b"1"],
    [b"9" * 30, b"0", b"4"],
    [b"5", b"x", b"y"],
]


def messages(backend: str) -> list[list[bytes]]:
    """Of NIXL also with the frame by which it knows its own."""
    return [*BAD, *([GUARD, *message] for message in BAD)] if backend == "nixl" else BAD


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_they_are_dropped(serve, fork_server, backend, role):
    log = fork_server("patched").log
    begins = log.stat().st_size
    with serve(Fleet(backend=backend)) as servers:
        assert_right(servers)
        (rank,) = getattr(servers, role)
        threads = rank.call("health")["threads"]
        line = Line(rank)
        line.send([*messages(backend), LAST_WORD])
        dropped = f"Dropped a message of {len(LAST_WORD)} frames".encode()
        assert awaited(lambda: dropped in log.read_bytes()[begins:], 10, pause=0.05)
        line.close()
        assert rank.call("health")["threads"] == threads
        assert_right(servers)


def test_one_ends_stock_prefill(serve, backend):
    with serve(Fleet(v_width=4, backend=backend), "stock", "stock") as servers:
        assert_right(servers)
        threads = len(servers.prefill[0].call("health")["threads"])
        line = Line(servers.prefill[0])
        line.send([ENDS_STOCK[backend]])
        assert awaited(
            lambda: len(servers.prefill[0].call("health")["threads"]) < threads, 10, pause=0.05
        )
        line.close()
        assert servers.request(*PAGES, seconds=HANG_SECONDS).state == "hang"
