"""Prefill sends head slices as whole rows, and names the chunks that decode must interleave.

The bytes of whole fleets are compared in the transport suite; `test_interleaving_receiver` tests
what decode does with the chunks.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import fake_managers
import numpy as np
import pytest
from engine_release import IS_0_5_18
from fake_managers import (
    DECODE,
    ENDPOINT,
    GQA_PAGE,
    GQA_PAGES,
    PEER,
    PREFILL,
    add_chunk,
    backend_of,
    gqa_layout,
    registered_peer,
    request_rooms,
    run_worker,
    sent_statuses,
    sent_units,
)
from rank_faults import nixl_agent
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import page_slots
from sglang.srt.disaggregation.pd.packing import PackingBuffers
from sglang.srt.disaggregation.pd.unit_exchange import UNITS, units_message

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

ROOM, OTHER_ROOM = 7, 9
SRC, DST = (9, 2, 3, 4), (5, 6, 1, 0)  # the request's pages
CHUNKS = [(0, 2), (2, 4)]
PARTS = gqa_layout((0, 2)), gqa_layout((0, 1))  # decode interleaves
PACKS = gqa_layout((0, 1)), gqa_layout((1, 2))  # prefill packs, if it has memory for that


def requested_prefill(backend, own, peer, packing=None, is_described=True):
    """A prefill rank from which a decode rank has requested the room."""
    prefill = fake_managers.prefill_rank(backend, own)
    prefill.kv_args.packing = packing
    decode = fake_managers.decode_rank(backend, peer)
    request_rooms(prefill, decode, ROOM, pages=DST, is_described=is_described)
    return prefill


def send_chunks(prefill) -> None:
    for start, end in CHUNKS:
        add_chunk(prefill, ROOM, SRC[start:end], start, is_last=end == len(SRC))
    run_worker(prefill)


def during_writes(prefill, act) -> None:
    """Calls `act` when a write starts."""
    is_nixl = backend_of(prefill) == "nixl"
    library = nixl_agent(prefill) if is_nixl else prefill.engine
    name = "transfer" if is_nixl else "batch_transfer_sync"
    write = getattr(library, name)
    setattr(library, name, lambda *given: (act(), write(*given))[1])


# Chunks that decode interleaves

# Both sides' layouts, whether decode describes its own, and the chunks that are named to it; None
# for no message.
PAIRS = {
    "prefill has fewer heads": (*PARTS, True, CHUNKS),
    "copies of another rank's heads": (gqa_layout((1, 8)), gqa_layout((0, 2)), True, CHUNKS),
    "prefill has more heads": (*PACKS, True, None),
    "equal TP sizes": (gqa_layout((0, 2)), gqa_layout((0, 2)), True, None),
    "prefill sends slices": (gqa_layout((0, 2), False), PARTS[1], True, []),
    "decode reads slices": (PARTS[0], gqa_layout((0, 1), False), True, None),
    "stock decode": (*PARTS, False, None),
    "latents": (fake_managers.mla_layout(), fake_managers.mla_layout(), True, None),
}


@pytest.mark.parametrize("own, peer, is_described, named", PAIRS.values(), ids=PAIRS)
def test_chunks_are_named_to_decode_that_interleaves(own, peer, is_described, named, backend):
    """A rank that only has copies of another's heads writes nothing, and names the chunks, too."""
    prefill = requested_prefill(backend, own, peer, is_described=is_described)
    send_chunks(prefill)
    assert list(prefill.sent_pages) == ([ROOM] if named else [])
    messages = [] if named is None else [units_message(ROOM, own.tp_rank, own.tp_size, named)]
    assert sent_units(prefill) == messages
    # To a stock decode rank, 0.5.18's NIXL sends notifications instead.
    has_no_status = IS_0_5_18 and backend == "nixl" and not is_described
    assert sent_statuses(prefill) == ([] if has_no_status else [(ROOM, KVPoll.Success, None)])


def test_chunks_are_named_before_the_room_succeeds(backend):
    prefill = requested_prefill(backend, *PARTS)
    send_chunks(prefill)
    address = "tcp://{}:{}".format(*ENDPOINT)
    assert [endpoint for endpoint, _ in prefill.notified] == [address] * 2
    assert [frames[0] == UNITS for _, frames in prefill.notified] == [True, False]


def test_room_whose_chunks_cannot_be_named_fails_on_both_sides(backend):
    """Otherwise decode would serve rows in the wrong order."""
    prefill = requested_prefill(backend, *PARTS)
    sender, send = fake_managers.new_sender(prefill, ROOM), prefill._send_multipart_locked

    def refuse(endpoint, frames, **more):
        if frames[0] == UNITS:
            raise OSError("no memory")
        send(endpoint, frames, **more)

    prefill._send_multipart_locked = refuse
    send_chunks(prefill)
    reason = "Prefill could not notify decode of the chunks to interleave: OSError('no memory')"
    assert sent_statuses(prefill) == [(ROOM, KVPoll.Failed, reason)]
    assert fake_managers.finish_failed(sender) == reason
    assert not prefill.sent_pages


def test_room_that_fails_during_its_last_write_names_no_chunks(backend):
    prefill = requested_prefill(backend, *PARTS)

    def fail() -> None:  # as the scheduler's thread does
        with ThreadPoolExecutor(1) as scheduler:
            scheduler.submit(prefill.update_status, ROOM, KVPoll.Failed).result()

    during_writes(prefill, fail)
    add_chunk(prefill, ROOM, SRC)
    run_worker(prefill)
    assert not sent_units(prefill)
    assert [status for _, status, _ in sent_statuses(prefill)] == [KVPoll.Failed]


def test_room_whose_decode_rank_was_released_meanwhile_fails(backend):
    """Its plan is gone, and with it whether decode must interleave."""
    prefill, writes = requested_prefill(backend, *PARTS), []

    def release_at_last_write():
        writes.append(len(writes))
        if len(writes) == 2:  # metadata
            registered_peer(prefill).plan = None

    during_writes(prefill, release_at_last_write)
    add_chunk(prefill, ROOM, SRC)
    run_worker(prefill)
    assert not sent_units(prefill)
    ((_, status, reason),) = sent_statuses(prefill)
    assert status == KVPoll.Failed and "decode was released" in reason


def test_named_chunks_are_dropped_with_their_room(backend):
    prefill = requested_prefill(backend, *PARTS)
    sender = fake_managers.new_sender(prefill, ROOM)
    send_chunks(prefill)
    assert sender.poll() == KVPoll.Success
    sender.clear()
    assert not prefill.sent_pages


@pytest.mark.parametrize("at_once", [0, 1, 3])
def test_mooncake_writes_all_pages_of_a_chunk_at_once(at_once):
    """Where a part lies depends on their number, whatever the limit of pages in one call is."""
    prefill, calls = requested_prefill("mooncake", *PARTS), []
    prefill.max_transfer_batch_indices = at_once
    prefill.engine.batch_transfer_sync = lambda session, *lists: calls.append(lists) or 0
    add_chunk(prefill, ROOM, SRC)
    run_worker(prefill)
    kv, _ = calls  # and metadata
    assert kv == registered_peer(prefill).plan.kv.copies(SRC, DST).lists()


@pytest.mark.parametrize("tp, peer_tp", [((0, 2), (0, 1)), ((0, 1), (1, 2))])
@pytest.mark.parametrize("whole_rows", [True, False])
def test_nixl_prepares_lists_of_blocks_only_for_slices(whole_rows, tp, peer_tp):
    own, peer = (gqa_layout(one, whole_rows, has_windows=True) for one in (tp, peer_tp))
    packing = object() if whole_rows else None
    prefill = requested_prefill("nixl", own, peer, packing)
    prepared = [prefill.prepared[PEER["nixl"], what] for what in ("kv", "state")]
    assert [one is None for one in prepared] == [whole_rows] * 2
    assert bool(prefill.own_dlists) == (not whole_rows)


# Rows that prefill packs

CAPACITY = 256  # bytes in a round: half of a request's keys of one layer, or all of its values
ROUNDS = 2 * 2 + 2


def rows(manager, number: int) -> np.ndarray:
    """One of a rank's KV buffers, `[slots, bytes per token]`."""
    return manager.kv_args.views.kv[number].numpy().reshape(GQA_PAGES * GQA_PAGE, -1)


def packing_ranks(backend):
    """A prefill rank that packs, and the second of two decode ranks, which requests the room."""
    prefill = fake_managers.prefill_rank(backend, PACKS[0])
    decode = fake_managers.decode_rank(backend, PACKS[1])
    for seed, manager in enumerate((prefill, decode)):
        fake_managers.give_memory(manager, seed)
    fake_managers.move_bytes(prefill)
    packing = PackingBuffers(prefill.kv_args.views, GQA_PAGE, nbytes=1, workers=1)
    packing.free = [(packing.memory[:CAPACITY], packing.memory[CAPACITY : 2 * CAPACITY])]
    prefill.kv_args.packing = packing
    request_rooms(prefill, decode, ROOM, pages=DST)
    return prefill, decode


def send_unit(prefill) -> list[int]:
    """Sends the request as one chunk; returns a list with an entry for each write."""
    writes = []
    during_writes(prefill, lambda: writes.append(len(writes)))
    add_chunk(prefill, ROOM, SRC)
    run_worker(prefill)
    return writes


def test_packed_rows_arrive_round_after_round(backend):
    prefill, decode = packing_ranks(backend)
    expected = [rows(decode, number).copy() for number in range(4)]
    src, dst = (page_slots(pages, GQA_PAGE) for pages in (SRC, DST))
    for number, one in enumerate(expected):
        one[dst] = rows(prefill, number)[src, one.shape[1] :]  # the upper half of the heads
    assert len(send_unit(prefill)) == ROUNDS + 1  # and metadata
    for number, one in enumerate(expected):
        np.testing.assert_array_equal(rows(decode, number), one)
    assert sent_statuses(prefill) == [(ROOM, KVPoll.Success, None)]
    assert not sent_units(prefill) and not prefill.sent_pages


def test_nixl_waits_for_each_round_before_the_next():
    """The memory that it reads is packed again."""
    prefill, _ = packing_ranks("nixl")
    agent, events = nixl_agent(prefill), []
    check = agent.check_xfer_state
    agent.check_xfer_state = lambda handle: (events.append("done"), check(handle))[1]
    during_writes(prefill, lambda: events.append("write"))
    send_unit(prefill)
    assert [event for event, _ in itertools.groupby(events)] == ["write", "done"] * (ROUNDS + 1)


@pytest.mark.parametrize("state", ["ERR", None], ids=["error", "unknown state"])
def test_failed_round_over_nixl_is_the_last(state):
    """If it may still write, decode is not told that its pages are free."""
    prefill, decode = packing_ranks("nixl")
    agent, writes = nixl_agent(prefill), []
    check = agent.check_xfer_state
    during_writes(prefill, lambda: writes.append(len(writes)))

    def fail_second(handle):
        if len(writes) < 2:
            return check(handle)
        if state is None:
            raise OSError("unknown handle")
        return state

    agent.check_xfer_state = fail_second
    assert len(send_unit(prefill)) == 2
    reason = "NIXL reported an error of a transfer to decode peer"
    if IS_0_5_18 and state is None:  # its decode is told, and keeps the pages for a while
        reason = "a transfer to decode peer does not end"
    is_told = IS_0_5_18 or state is not None
    assert sent_statuses(prefill) == ([(ROOM, KVPoll.Failed, reason)] if is_told else [])
    assert prefill.request_status[ROOM] == KVPoll.Failed
    assert (ROOM in prefill._deferred_ack_poisoned_rooms) == (state is None)
    agent.check_xfer_state = check
    request_rooms(prefill, decode, OTHER_ROOM, pages=DST)
    add_chunk(prefill, OTHER_ROOM, SRC)
    run_worker(prefill)
    assert sent_statuses(prefill)[-1] == (OTHER_ROOM, KVPoll.Success, None)


def test_failed_round_over_mooncake_is_the_last():
    prefill, _ = packing_ranks("mooncake")
    results = [0, -1, 0]
    prefill.engine.batch_transfer_sync = lambda *given: results.pop(0)
    send_unit(prefill)
    assert len(results) == 1
    ((_, status, reason),) = sent_statuses(prefill)
    assert status == KVPoll.Failed and "Failed to send kv chunk" in reason


@pytest.mark.parametrize(
    "role, tp, packs",
    [(PREFILL, (0, 1), True), (PREFILL, (0, 4), False), (DECODE, (0, 1), False)],
    ids=["prefill", "prefill with one head", "decode"],
)
def test_memory_to_pack_in_is_made_once_and_registered(role, tp, packs, backend, monkeypatch):
    """After a pause the buffers are registered again."""
    monkeypatch.setenv("SGLANG_PD_PACKING_MIB", "2")
    manager, regions = fake_managers.make_manager(backend, gqa_layout(tp), role), []
    fake_managers.give_memory(manager)
    if backend == "nixl":
        manager.agent.register_memory = lambda those, _: regions.extend(those) or "descriptors"
    else:
        manager.engine.batch_register = lambda *those: regions.extend(zip(*those)) or 0
    manager.register_buffer_to_engine()
    packing = manager.packing
    assert (packing is not None) == packs
    if packs:
        _, address, size = packing.region
        assert size == 2 << 20
        assert (address, size) in [region[:2] for region in regions]
    manager.register_buffer_to_engine()
    assert manager.packing is packing


@pytest.mark.parametrize("answer", ["none", "an error"])
def test_rank_whose_memory_to_pack_in_nixl_refuses_sends_slices(monkeypatch, caplog, answer):
    monkeypatch.setenv("SGLANG_PD_PACKING_MIB", "2")
    manager = fake_managers.make_manager("nixl", gqa_layout((0, 1)), PREFILL)
    fake_managers.give_memory(manager)

    def register(regions, kind):
        if any(size == 2 << 20 for _, size, *_ in regions):
            if answer == "none":
                return None
            raise RuntimeError("no memory regions left")
        return "descriptors"

    manager.agent.register_memory = register
    manager.register_buffer_to_engine()
    assert manager.packing is None
    assert "did not register the 2,097,152 bytes in which KV heads are packed" in caplog.text


def test_mooncake_deregisters_memory_to_pack_in_for_a_pause():
    """Else it could not be registered again."""
    prefill, _ = packing_ranks("mooncake")
    dropped = []
    prefill.engine.batch_deregister = dropped.extend
    prefill.deregister_buffer_to_engine()
    assert prefill.packing.region[1] in dropped
    assert set(prefill.kv_args.kv_data_ptrs) < set(dropped)
