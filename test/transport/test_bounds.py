"""Pages outside of a rank's buffers: the request that names them fails, and nothing is written."""

import dataclasses

import pytest
from fleet import Fleet, Side

pytestmark = [
    pytest.mark.transport,
    pytest.mark.parametrize("backend", ["nixl", "mooncake"]),
]

FLEET = Fleet(v_width=4)
# Pages are 0 to 12: the engine's pools have one more than they hand out.
OUTSIDE = FLEET.pages + 1
FLEETS = {
    "whole": FLEET,
    "sliced": dataclasses.replace(FLEET, prefill=Side(tp=2)),
    "state": Fleet(mla=True, index_keys=True, page_size=64),
}


@pytest.mark.parametrize("name", FLEETS)
def test_a_page_outside_of_decodes_buffers(serve, backend, name):
    """A transport tells only where no registered memory is hit; another layer's page is."""
    with serve(dataclasses.replace(FLEETS[name], backend=backend)) as servers:
        outcome = servers.request([2, 3], [4, OUTSIDE])
        assert outcome.state == "failed", outcome
        said = f"prefill sends pages 2 to 3 of {OUTSIDE}, decode has set aside pages 4 to {OUTSIDE}"
        assert f"{said} of {OUTSIDE}" in outcome.reasons
        outcome = servers.request([1, 2, 12], [12, 0, 5])
        assert outcome.state == "right", outcome
