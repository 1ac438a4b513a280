"""A chunk that cannot be sent fails its room on both sides; nothing is raised in the scheduler."""

import managers
import numpy as np
import pytest
from managers import BACKENDS, DECODE, ENGINES, PATCHED, PEER, SENDERS, queued
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import EngineCommonKVSender

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("published")]

backends = pytest.mark.parametrize("backend", BACKENDS)
ROOM = 7


def asked(backend, pages=4, own=None, is_registered=True, kinds=PATCHED):
    """A prefill rank that a decode rank has asked for a room of so many pages."""
    prefill = managers.rank(backend, own or managers.latents(), kinds=kinds)
    decode = managers.rank(backend, managers.latents(), DECODE)
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    messages = [managers.registration(decode)] * is_registered
    managers.read(prefill, *messages, managers.request(decode, ROOM, range(pages)))
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    return prefill


def add(prefill, first: int, last: int, is_last: bool = True) -> None:
    pages = np.arange(first, last, dtype=np.int32)
    prefill.add_transfer_request(ROOM, pages, slice(first, last), is_last, aux_index=0)


def has_failed(prefill) -> str:
    """Both sides know why."""
    assert queued(prefill) == 0
    assert prefill.request_status[ROOM] == KVPoll.Failed
    ((room, status, reason),) = managers.statuses(prefill)
    assert (room, status) == (ROOM, KVPoll.Failed)
    assert prefill.failure_records[ROOM] == reason
    return reason


@backends
def test_all_is_well(backend):
    prefill = asked(backend)
    add(prefill, 0, 2, False)
    add(prefill, 2, 4)
    assert queued(prefill) == 2
    assert not prefill.told


@backends
def test_a_peer_that_is_refused(backend):
    prefill = asked(backend, own=managers.latents(layers=3))
    add(prefill, 0, 4)
    reason = has_failed(prefill)
    assert reason.startswith("Prefill cannot serve this decode server: ")
    assert "number of layers: prefill has 3, decode has 4" in reason


def test_ranks_whose_session_has_no_port():
    """Two of one host: the room would wait for the second, which is taken for the first."""
    prefill = managers.rank("mooncake", managers.latents())
    decode = managers.rank("mooncake", managers.latents(), DECODE)
    decode.engine.session = "127.0.0.1:0"
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    ask = managers.request(decode, ROOM, range(4), required_dst_info_num=2)
    managers.read(prefill, managers.registration(decode), ask, ask)
    assert prefill.request_status[ROOM] == KVPoll.WaitingForInput
    add(prefill, 0, 4)
    reason = has_failed(prefill)
    assert reason.startswith("Prefill cannot serve this decode server: ")
    assert "decode's session id is 127.0.0.1:0, which has no port" in reason


@backends
def test_a_peer_that_never_registered(backend):
    prefill = asked(backend, is_registered=False)
    add(prefill, 0, 4)
    assert has_failed(prefill) == (
        f"decode {PEER[backend]} asks for room {ROOM} and is not registered with this prefill"
    )


@backends
def test_such_a_peer_where_decode_has_context_parallelism(backend):
    """How much is sent at once depends on its registration; the engine raises in the scheduler."""
    prefill = asked(backend, is_registered=False)
    prefill._dcp_pack_max_tokens = 512
    sender = SENDERS[backend](prefill, "127.0.0.1:8998", ROOM)
    with pytest.raises(KeyError):
        EngineCommonKVSender.get_max_transfer_tokens(sender)
    assert sender.get_max_transfer_tokens() == 512
    add(prefill, 0, 4)
    assert "is not registered with this prefill" in has_failed(prefill)


@backends
def test_what_the_engine_does_with_such_peers(backend):
    """It queues the chunk; what its worker then makes of it is the worker's."""
    prefill = asked(backend, is_registered=False, kinds=ENGINES)
    add(prefill, 0, 4)
    assert queued(prefill) == 1


@backends
def test_too_few_pages(backend):
    prefill = asked(backend, pages=3)
    add(prefill, 0, 2, False)
    assert prefill.transfer_queues[0].get().room == ROOM
    add(prefill, 2, 4)
    assert "prefill sends 4 pages where decode has set aside 3" in has_failed(prefill)


@backends
def test_what_the_engine_does_with_too_few_pages(backend):
    prefill = asked(backend, pages=3, kinds=ENGINES)
    add(prefill, 0, 4)
    assert queued(prefill) == 1


@backends
def test_an_exception_in_the_engines_own(backend):
    prefill = asked(backend)
    prefill.transfer_queues = []
    add(prefill, 0, 4)
    prefill.transfer_queues = [managers.FastQueue()]
    assert has_failed(prefill).startswith("Prefill could not send KV: ZeroDivisionError(")


@backends
def test_the_engine_raises_it_in_the_scheduler(backend):
    prefill = asked(backend, kinds=ENGINES)
    prefill.transfer_queues = []
    with pytest.raises(ZeroDivisionError):
        add(prefill, 0, 4)


@backends
@pytest.mark.parametrize("is_cleared", [True, False])
def test_a_room_that_is_over_goes_the_engines_way(backend, is_cleared):
    """Which has its own reason, and told it."""
    prefill = asked(backend, pages=3, is_registered=False)
    prefill.record_failure(ROOM, "aborted")
    prefill.update_status(ROOM, KVPoll.Failed)
    if is_cleared:
        for table in (prefill.request_status, prefill.transfer_infos, prefill.failure_records):
            table.pop(ROOM)
    add(prefill, 0, 4)
    assert not prefill.told
    assert prefill.failure_records == ({} if is_cleared else {ROOM: "aborted"})
    assert ROOM not in prefill.request_status or not is_cleared


@backends
def test_a_rank_that_wants_no_pages(backend):
    """Another one has this rank's heads; it asks, so that prefill knows how many will."""
    prefill = managers.rank(backend, managers.latents())
    decode = managers.rank(backend, managers.latents(), DECODE)
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    ask = decode.build_receiver_metadata_message(
        bootstrap_room=ROOM,
        required_dst_info_num=1,
        kv_indices=np.array([], np.int32),
        aux_index=0,
        state_indices=None,
        decode_prefix_len=0,
        is_dummy=True,
    )
    managers.read(prefill, managers.registration(decode), ask)
    add(prefill, 0, 4)
    assert queued(prefill) == 1
    assert not prefill.told


@backends
def test_each_chunk_is_noted_for_its_digests(backend):
    prefill = asked(backend)
    prefill.kv_args.verifier = object()
    add(prefill, 0, 2, False)
    add(prefill, 2, 4)
    (info,) = prefill.transfer_infos[ROOM].values()
    noted = [(where, pages.tolist()) for where, pages in info.sent_chunks]
    assert noted == [(slice(0, 2), [0, 1]), (slice(2, 4), [2, 3])]


@backends
def test_every_decode_rank_of_the_room_is_told(backend):
    """Two ask; one of them is refused."""
    prefill = managers.rank(backend, managers.latents())
    prefill.request_status[ROOM] = KVPoll.Bootstrapping
    for number, layers in enumerate((4, 3)):
        decode = managers.rank(backend, managers.latents(layers=layers), DECODE)
        decode.rank_port += number
        name = f"127.0.0.1:700{number}"
        if backend == "nixl":
            decode.agent.name = name
        else:
            decode.engine.session = name
        ask = managers.request(decode, ROOM, range(4), required_dst_info_num=2)
        managers.read(prefill, managers.registration(decode), ask)
    add(prefill, 0, 4)
    assert {endpoint for endpoint, _ in prefill.told} == {
        "tcp://127.0.0.1:5555",
        "tcp://127.0.0.1:5556",
    }
    assert {status for _, status, _ in managers.statuses(prefill)} == {KVPoll.Failed}
