"""State pages of both sides pair by position: if one list is shorter, the request fails.

Stock NIXL refuses such lists, too; stock Mooncake truncates the longer one.
"""

import fake_managers
import pytest
from engine_release import not_0_5_18
from fake_managers import ENGINES, PATCHED, mla_layout, posted_copies, registered_peer
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import Heads, LayoutError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

LISTS = {
    "decode has fewer": ([4, 5, 6], [2, 3]),
    "prefill has fewer": ([5, 6], [1, 2, 3]),
    "decode has none": ([4, 5], []),
}
lists = pytest.mark.parametrize("own, theirs", LISTS.values(), ids=LISTS)
KINDS = {
    "dsa": mla_layout((64 * 132,) * 4),
    "swa": fake_managers.mha_layout(Heads(0, 2, 2), (0, 1), window_bytes=128),
}
kinds = pytest.mark.parametrize("kind", KINDS)
ROOM, NEXT = 7, 9


def requested_prefill(backend, kind, theirs, classes=PATCHED, is_planned=True, peer=None):
    """A prefill rank from which decode requests ROOM with state pages `theirs`, and room NEXT."""
    prefill = fake_managers.prefill_rank(backend, KINDS[kind], kinds=classes)
    decode = fake_managers.decode_rank(backend, peer or KINDS[kind])
    for room, pages in ((ROOM, theirs), (NEXT, [1, 2])):
        fake_managers.request_rooms(prefill, decode, room, state_indices=[pages])
    if not is_planned:
        registered_peer(prefill).plan = None
    return prefill


def run_worker(prefill, own) -> dict[int, list]:
    """Sends both rooms with Mooncake's worker; returns each room's status and reason for decode."""
    for room, pages in ((ROOM, own), (NEXT, [4, 5])):
        fake_managers.add_chunk(prefill, room, state_indices=[pages])
    fake_managers.run_mooncake_worker(prefill)
    return {room: status for room, *status in fake_managers.sent_statuses(prefill)}


def state_writes(prefill) -> list[tuple[int, int]]:
    """The pages written between the first state buffers: (prefill's, decode's) of each."""
    size = prefill.kv_args.state_item_lens[0][0]
    starts = [base + fake_managers.STATE for base in fake_managers.BASE.values()]
    written = []
    for src, dst, length in posted_copies(prefill):
        ours, theirs = src - starts[0], dst - starts[1]
        if 0 <= ours < fake_managers.BUFFER and 0 <= theirs < fake_managers.BUFFER:
            written += [((ours + n) // size, (theirs + n) // size) for n in range(0, length, size)]
    return written


@pytest.mark.parametrize("is_planned", [True, False], ids=["by plan", "by the engine"])
@kinds
@lists
def test_different_state_page_counts_fail_the_room(kind, own, theirs, is_planned):
    prefill = requested_prefill("mooncake", kind, theirs, is_planned=is_planned)
    statuses = run_worker(prefill, own)
    status, reason = statuses[ROOM]
    assert status == KVPoll.Failed
    said = f"prefill sends {len(own)} pages of {kind} state where decode has set aside"
    assert f"{said} {len(theirs)};" in reason
    assert prefill.failure_records[ROOM] == reason
    assert statuses[NEXT] == [KVPoll.Success, None]
    assert state_writes(prefill) == [(4, 1), (5, 2)]  # the other room's


@kinds
@lists
def test_stock_mooncake_truncates_the_longer_list(kind, own, theirs):
    """Prefill's last page is 6 and decode's is 3, but stock does not pair them."""
    prefill = requested_prefill("mooncake", kind, theirs, ENGINES)
    assert run_worker(prefill, own)[ROOM] == [KVPoll.Success, None]
    assert state_writes(prefill) == [*zip(own, theirs), (4, 1), (5, 2)]
    assert (6, 3) not in state_writes(prefill)


@kinds
@lists
@pytest.mark.parametrize(
    "classes, error", [(PATCHED, LayoutError), (ENGINES, RuntimeError)], ids=["patched", "stock"]
)
def test_nixl_sends_no_state_with_different_page_counts(kind, own, theirs, classes, error):
    prefill = requested_prefill("nixl", kind, theirs, classes)
    with pytest.raises(error, match=rf"(?s){len(own)}.*{len(theirs)}"):
        fake_managers.send_nixl_state(prefill, [own], [theirs])
    assert not posted_copies(prefill)


@not_0_5_18("does not compare how many buffers both sides have")
def test_state_that_decode_did_not_register_is_left_to_the_engine():
    """The engine's reason names what is missing."""
    prefill = requested_prefill("mooncake", "dsa", [], is_planned=False, peer=mla_layout())
    status, reason = run_worker(prefill, [4, 5, 6])[ROOM]
    assert status == KVPoll.Failed and "4 entries" in reason
    assert not state_writes(prefill)
