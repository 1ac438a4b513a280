"""Ranks drop messages that no rank of this release sends, and serve the next request.

`test_fuzz` covers this for 0.5.9, and shows that such a message kills stock's thread.
"""

import pytest
from engine_release import SINCE_0_5_18
from fleet import Fleet
from raw_socket import RawSocket
from transfer_checks import BACKENDS, assert_transfers

from pd_harness.polling import wait_until

pytestmark = [
    pytest.mark.transport,
    pytest.mark.skipif(not SINCE_0_5_18, reason="0.5.9 has its own"),
]

GUARD = b"NixlMsgGuard"
# A message with too many frames; once it is logged, the rank has read all earlier messages.
LAST_MESSAGE = [b"x"] * 65
INVALID_MESSAGES = [
    [b""],
    [b"hello"],
    [b"\xff\xfe"],
    [b"\xff" * 20] * 4,
    [b"ABORT"],
    [b"ABORT", b"x", b"y", b"z"],
    [b"ABORT", b"7", b"127.0.0.1", b"no port"],
    [b"ABORT", b"7", b"127.0.0.1", b"5555", b"x"],
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
    [b"PD_UNITS", b"x"],
    [b"PD_UNITS", b"1", b"0", b"2"],
    [b"PD_UNITS", b"1", b"0", b"2", b"\xff"],
    [b"PD_UNITS", b"1", b"0", b"0", b"\x90"],
    [b"PD_UNITS", b"1", b"0", b"4294967296", b"\x90"],
    [b"None"],
    [b"None", b"127.0.0.1", b"1", b"127.0.0.1:1", *[b"x"] * 17],
    [b"5", b"127.0.0.1", b"1", b"127.0.0.1:1", b"\0" * 3, b"0", b"", b"1"],
    [b"5", b"127.0.0.1", b"1", b"no session", b"\0" * 4, b"0", b"", b"1"],
    [b"-5", b"127.0.0.1", b"1", b"127.0.0.1:1", b"\0" * 4, b"0", b"", b"1"],
    [b"9" * 30, b"0", b"4"],
    [b"5", b"x", b"y"],
]
GUARDED_MESSAGES = [[GUARD, *message] for message in INVALID_MESSAGES]
MESSAGES = {"nixl": INVALID_MESSAGES + GUARDED_MESSAGES, "mooncake": INVALID_MESSAGES}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_invalid_messages_are_dropped(serve, fork_server, backend, role):
    log = fork_server("patched").log
    begins = log.stat().st_size
    with serve(Fleet(backend=backend)) as servers:
        assert_transfers(servers)
        (rank,) = getattr(servers, role)
        threads = rank.call("health")["threads"]
        sock = RawSocket(rank)
        sock.send([*MESSAGES[backend], LAST_MESSAGE])
        dropped = f"Dropped a message of {len(LAST_MESSAGE)} frames".encode()
        assert wait_until(lambda: dropped in log.read_bytes()[begins:], 10, pause=0.05)
        sock.close()
        assert rank.call("health")["threads"] == threads
        assert_transfers(servers)
