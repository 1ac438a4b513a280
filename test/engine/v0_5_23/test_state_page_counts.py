"""State pages of both sides pair by position: if one list is shorter, the request fails.

Stock NIXL refuses such lists, too; stock Mooncake truncates the longer one.
"""

from concurrent.futures import ThreadPoolExecutor

import fake_managers
import numpy as np
import pytest
from fake_managers import BASE, BUFFER, DECODE, ENGINES, PATCHED, PEER, PREFILL, STATE
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
    "dsa": fake_managers.mla_layout((64 * 132,) * 4),
    "swa": fake_managers.mha_layout(Heads(0, 2, 2), (0, 1), window_bytes=128),
}
kinds = pytest.mark.parametrize("kind", KINDS)
ROOM, NEXT = 7, 9


def requested_prefill(backend, kind, theirs, classes=PATCHED, is_planned=True, peer=None):
    """A prefill rank from which decode requests ROOM with state pages `theirs`, and room NEXT."""
    prefill = fake_managers.make_manager(backend, KINDS[kind], kinds=classes)
    decode = fake_managers.make_manager(backend, peer or KINDS[kind], DECODE)
    asks = [
        fake_managers.metadata_message(decode, room, range(3), state_indices=[pages])
        for room, pages in ((ROOM, theirs), (NEXT, [1, 2]))
    ]
    for room in (ROOM, NEXT):
        prefill.request_status[room] = KVPoll.Bootstrapping
    fake_managers.process_messages(prefill, fake_managers.registration_message(decode), *asks)
    if not is_planned:
        fake_managers.registered_peer(prefill).plan = None
    return prefill


def run_worker(prefill, own) -> dict[int, list]:
    """Sends both rooms with Mooncake's worker; returns each room's status and reason for decode."""
    (queue,) = prefill.transfer_queues
    for room, pages in ((ROOM, own), (NEXT, [4, 5])):
        numbers = np.arange(3, dtype=np.int32)
        more = {"aux_index": 0, "state_indices": [pages]}
        prefill.add_transfer_request(room, numbers, slice(0, 3), True, **more)
    queue.put(None)
    with ThreadPoolExecutor(1) as executor:
        prefill.transfer_worker(queue, executor)
    return {room: sent_statuses for room, *sent_statuses in fake_managers.sent_statuses(prefill)}


def state_writes(prefill) -> list[tuple[int, int]]:
    """The pages written between the first state buffers: (prefill's, decode's) of each."""
    size = prefill.kv_args.state_item_lens[0][0]
    starts = (BASE[PREFILL] + STATE, BASE[DECODE] + STATE)
    written = []
    for src, dst, length in fake_managers.posted_copies(prefill):
        ours, theirs = src - starts[0], dst - starts[1]
        if 0 <= ours < BUFFER and 0 <= theirs < BUFFER:
            written += [((ours + n) // size, (theirs + n) // size) for n in range(0, length, size)]
    return written


@pytest.mark.parametrize("is_planned", [True, False], ids=["by plan", "by the engine"])
@kinds
@lists
def test_different_state_page_counts_fail_the_room(kind, own, theirs, is_planned):
    prefill = requested_prefill("mooncake", kind, theirs, is_planned=is_planned)
    sent_statuses = run_worker(prefill, own=own)
    status, reason = sent_statuses[ROOM]
    assert status == KVPoll.Failed
    said = f"prefill sends {len(own)} pages of {kind} state where decode has set aside"
    assert f"{said} {len(theirs)};" in reason
    assert prefill.failure_records[ROOM] == reason
    assert sent_statuses[NEXT] == [KVPoll.Success, None]
    assert state_writes(prefill) == [(4, 1), (5, 2)]  # the other room's


@kinds
@lists
def test_stock_mooncake_truncates_the_longer_list(kind, own, theirs):
    """Prefill's last page is 6 and decode's is 3, but stock does not pair them."""
    prefill = requested_prefill("mooncake", kind, theirs, ENGINES)
    sent_statuses = run_worker(prefill, own=own)
    assert sent_statuses[ROOM] == [KVPoll.Success, None]
    assert state_writes(prefill) == [*zip(own, theirs), (4, 1), (5, 2)]
    assert (6, 3) not in state_writes(prefill)


def send_over_nixl(prefill, own, theirs) -> None:
    info = fake_managers.registered_peer(prefill)
    more = {"dst_state_item_lens": info.dst_state_item_lens, "decode_tp_rank": 0}
    sent = (PEER["nixl"], [own], info.dst_state_data_ptrs, [theirs], 0, 1)
    list(prefill.maybe_send_extra(*sent, **more))


@kinds
@lists
@pytest.mark.parametrize(
    "classes, error", [(PATCHED, LayoutError), (ENGINES, RuntimeError)], ids=["patched", "stock"]
)
def test_nixl_sends_no_state_with_different_page_counts(kind, own, theirs, classes, error):
    prefill = requested_prefill("nixl", kind, theirs, classes)
    with pytest.raises(error, match=rf"(?s){len(own)}.*{len(theirs)}"):
        send_over_nixl(prefill, own, theirs)
    assert not fake_managers.posted_copies(prefill)


def test_state_that_decode_did_not_register_is_left_to_the_engine():
    """The engine's reason names what is missing."""
    prefill = requested_prefill(
        "mooncake", "dsa", [], is_planned=False, peer=fake_managers.mla_layout()
    )
    status, reason = run_worker(prefill, own=[4, 5, 6])[ROOM]
    assert status == KVPoll.Failed and "4 entries" in reason
    assert not state_writes(prefill)
