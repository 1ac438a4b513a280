"""Every byte of a request's metadata slot, also if only one side has a draft model.

The side with a draft has rows of hidden states as wide as the model; the other's hold 16 floats.
"""

import pytest
from fleet import Fleet, Side
from transfer_checks import assert_right
from transport_cases import same_widths, with_environment, with_fields

pytestmark = [
    pytest.mark.transport,
    pytest.mark.parametrize("backend", ["nixl", "mooncake", "mooncake_tcp"]),
]

DRAFT = Side(draft_layers=1)
FLEETS = {
    "none": Fleet(),
    "both": Fleet(DRAFT, DRAFT),
    "prefill": Fleet(DRAFT, Side()),
    "decode": Fleet(Side(), DRAFT),
    "prefill_tp2_to_1": Fleet(Side(tp=2, draft_layers=1), Side()),
    "decode_tp1_to_2": Fleet(Side(), Side(tp=2, draft_layers=1)),
}
# Uses decode's slots 1 to 7, 0 and 1 again. Slot 1 of wide rows lies within narrow rows' memory.
ROOM, REQUESTS = 6, 9
REQUEST = ([9, 2, 3], [0, 1, 2])


def with_backend(backend, fleet):
    """Sets the backend, and V as wide as K for stock; `mooncake_tcp` sends metadata as messages."""
    tcp = {"SGLANG_MOONCAKE_SEND_AUX_TCP": "1"} if backend == "mooncake_tcp" else {}
    fleet = with_fields(same_widths(fleet), backend=backend.removesuffix("_tcp"))
    return with_environment(fleet, **tcp)


def assert_all_slots_right(servers):
    for room in range(ROOM, ROOM + REQUESTS):
        assert_right(servers, *REQUEST, room=room)


@pytest.mark.parametrize("name", FLEETS)
def test_metadata_is_right(serve, backend, name):
    with serve(with_backend(backend, FLEETS[name])) as servers:
        assert_all_slots_right(servers)


@pytest.mark.parametrize("name", ["both", "prefill", "decode"])
def test_metadata_for_stock_decode_is_right(serve, backend, name):
    """Stock decode sends no row widths, but its pointers show whether it has a draft."""
    with serve(with_backend(backend, FLEETS[name]), "patched", "stock") as servers:
        assert_all_slots_right(servers)


@pytest.mark.parametrize("decode", ["stock", "patched"])
def test_stock_prefill_writes_to_other_slots(serve, backend, decode):
    """Stock prefill computes offsets with its own narrow row width.

    A patched decode rank can correct this only if the metadata arrive as messages. With a draft
    on prefill only, stock sends no KV.
    """
    with serve(with_backend(backend, FLEETS["decode"]), "stock", decode) as servers:
        outcome = servers.request(*REQUEST, room=ROOM)
    if (backend, decode) == ("mooncake_tcp", "patched"):
        assert outcome.state == "right", outcome
    else:
        assert (outcome.state, outcome.reasons[:16]) == ("wrong", "metadata row 8: "), outcome
