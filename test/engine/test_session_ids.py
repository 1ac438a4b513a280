"""Session ids of every transfer library are parsed; invalid ones are refused."""

import pytest
from sglang.srt.disaggregation.pd.session_ids import port_of, unreachable_reason

pytestmark = pytest.mark.engine

MEMFABRIC_SESSION_ID = "127.0.0.1:17217_10565"  # as 1.0.5 to 1.1.2 write it


@pytest.mark.parametrize(
    "session, port",
    [
        (MEMFABRIC_SESSION_ID, 17217),
        ("10.0.0.1:1", 1),
        ("10.0.0.1:0", 0),
        ("[::1]:65535", 65535),
        ("fe80::1:4000", 4000),  # as 0.5.9 writes it
        ("node-7.local:12001", 12001),
    ],
)
def test_port_of_valid_session_ids(session, port):
    assert port_of(session) == port
    int(session.rsplit(":", 1)[1])  # the engine chooses a queue by it


@pytest.mark.parametrize(
    "session",
    ["", "host", "host:", ":1", "host:-1", "host:+1", "host:x", "host: 1", "host:1 ", "host:\u0661"]
    + ["host:1_", "host:_1", "host:1__2", "host:1_2_3", "host:0x1", "host:1\n"],
)
def test_invalid_session_ids_are_refused(session):
    with pytest.raises(ValueError, match="invalid session id .*, expected HOST:PORT"):
        port_of(session)


def test_session_id_with_port_0_is_unreachable():
    why = unreachable_reason("10.0.0.1:0")
    assert "decode's session id is 10.0.0.1:0, which has no port" in why
    assert "memfabric-hybrid 1.1.2 or earlier" in why
    assert not unreachable_reason(MEMFABRIC_SESSION_ID)
