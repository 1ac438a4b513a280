"""A request with a page or slot outside a rank's buffers fails, and nothing is written.

A transport rejects a write only if it hits unregistered memory. Another layer's page is registered,
and so is, with MemFabric, the whole 2 MiB page around any registered memory.
"""

import pytest
from fleet import Fleet, Servers, Side
from transfer_checks import assert_right, nightly_except
from transport_cases import NSA, with_environment, with_fields

pytestmark = pytest.mark.transport

FLEET = Fleet(v_width=4)
# Pages are 0 to 12, because the engine's pools have one more page than they allocate.
FIRST_INVALID_PAGE = FLEET.pages + 1
FLEETS = {
    "whole": FLEET,
    "interleaved": with_fields(FLEET, prefill=Side(tp=2)),
    "packed": with_fields(FLEET, decode=Side(tp=2)),
    "sliced": with_environment(with_fields(FLEET, prefill=Side(tp=2)), SGLANG_PD_PACKED="0"),
    "state": Fleet(**NSA),
}
RECURRENT = Fleet(hybrid="mamba", layers=4)
BACKENDS = ["nixl", "mooncake", "ascend"]
PAGES = ([1, 2, 12], [12, 0, 5])


def assert_fails_without_stray_writes(servers: Servers, said: str, pages=PAGES):
    """Asserts that a request fails with `said`, and that all writes hit buffers of decode."""
    outcome = servers.request(*pages)
    assert outcome.state == "failed", outcome
    assert said in outcome.reasons
    theirs = [one for rank in servers.decode for one in rank.call("registered_buffers")]
    for rank in servers.prefill:
        assert rank.call("writes_outside", ranges=theirs)["outside"] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", nightly_except(FLEETS, "whole", "interleaved", "packed", "state"))
def test_page_out_of_bounds_fails_the_request(serve, backend, name):
    with serve(with_fields(FLEETS[name], backend=backend)) as servers:
        for rank in servers.prefill:
            rank.call("record_writes")
        first = FIRST_INVALID_PAGE
        said = f"prefill sends pages 2 to 3 of {first}, decode has set aside pages 4 to {first}"
        assert_fails_without_stray_writes(servers, f"{said} of {first}", ([2, 3], [4, first]))
        assert_right(servers, *PAGES)


@pytest.mark.parametrize("backend", ["mooncake", "ascend"])
@pytest.mark.parametrize("page", [FIRST_INVALID_PAGE, 1 << 20])
def test_page_out_of_bounds_of_stock_decode_fails_the_request(serve, backend, page):
    """Stock decode sends no page count; its pages must end before its next buffer starts."""
    with serve(with_fields(FLEET, backend=backend), decode="stock") as servers:
        servers.prefill[0].call("record_writes")
        said = f"decode has set aside pages 4 to {page} of"
        assert_fails_without_stray_writes(servers, said, ([2, 3], [4, page]))
        assert_right(servers, *PAGES)


@pytest.mark.parametrize("backend", ["mooncake", "ascend"])
@pytest.mark.parametrize(
    "what, fleet, said",
    [
        ("metadata", FLEET, "decode has set aside slot 8 of 8"),
        ("state", RECURRENT, "decode has set aside state 0 slots 9 to 9 of 9"),
    ],
)
def test_slot_out_of_bounds_fails_the_request(serve, backend, what, fleet, said):
    """The engine's own code sends this state, one slot per request, without a transfer plan."""
    with serve(with_fields(fleet, backend=backend)) as servers:
        (prefill,) = servers.prefill
        prefill.call("record_writes")
        assert_right(servers, *PAGES)
        prefill.call("use_bad_indices", what=what)
        assert_fails_without_stray_writes(servers, said)
        prefill.call("use_bad_indices", what="")
        assert_right(servers, *PAGES)
