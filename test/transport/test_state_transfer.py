"""State beside KV, byte for byte: index keys (NSA), sliding windows, recurrent (Mamba) state.

The tests send the engine's pools over NIXL (UCX) and Mooncake (TCP). A stock engine registers no
state of a draft model, so decode's draft state stays unwritten.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_release import IS_0_5_18, SINCE_0_5_18
from fleet import Fleet, Side
from transfer_checks import (
    BACKENDS,
    HANG_SECONDS,
    REQUESTS,
    assert_all_right,
    assert_failed,
    assert_heads_moved,
    assert_no_room_kept,
    only_0_5_9,
)
from transport_cases import NSA, with_fields

pytestmark = pytest.mark.transport

SCATTERED = REQUESTS[2][:2]


def pair(drafts=(0, 0), tp=(1, 1), pp=(1, 1), **more):
    """Returns a fleet; `drafts` are the draft layers of prefill's and decode's last stage."""
    sides = [Side(tp=t, pp=p, draft_layers=d) for t, p, d in zip(tp, pp, drafts)]
    return Fleet(*sides, **more)


def nsa(drafts=(0, 0), layers=4, **more):
    return pair(drafts, layers=layers, **NSA, **more)


def swa(drafts=(0, 0), layers=6, **more):
    """Returns a fleet whose layers 0, 2, ... have a sliding window; stock needs V as wide as K."""
    return pair(drafts, layers=layers, v_width=4, hybrid="swa", **more)


def mamba(tp=(1, 1), hybrid="mamba"):
    return pair(tp=tp, layers=4, hybrid=hybrid)


def with_backend(backend, fleet):
    return with_fields(fleet, backend=backend)


def alternate_backends(names):
    """Parametrizes each name over both backends; only nightly runs use both, others use one."""
    return pytest.mark.parametrize(
        "name, backend",
        [
            pytest.param(name, backend, marks=[] if at % 2 == turn else [pytest.mark.nightly])
            for at, name in enumerate(names)
            for turn, backend in enumerate(BACKENDS)
        ],
    )


RIGHT = {
    "nsa_draft": nsa((1, 1)),
    "nsa_draft_tp2_to_2": nsa((1, 1), tp=(2, 2)),
    "nsa_draft_tp2_to_1": nsa((1, 1), tp=(2, 1)),
    "nsa_draft_pp2_odd": nsa((1, 1), pp=(2, 1), layers=7),
    "nsa_draft_pp3_uneven": nsa((1, 1), pp=(3, 1), layers=7, stages=(2, 2, 3)),
    "nsa_draft_pp2_to_pp2": nsa((1, 1), pp=(2, 2), layers=5),
    "nsa_drafts_2_to_1": nsa((2, 1), pp=(2, 1), layers=5),
    "nsa_drafts_1_to_2": nsa((1, 2), pp=(2, 1), layers=5),
    "swa": swa(),
    "swa_tp2_to_2": swa(tp=(2, 2)),
    "swa_tp2_to_1": swa(tp=(2, 1)),
    "swa_tp1_to_2": swa(tp=(1, 2)),
    # Layers with a window have more heads than full-attention layers, as in MiMo-V2, or fewer.
    "swa_more_heads_tp2_to_1": swa(tp=(2, 1), kv_heads=1, window_heads=2),
    "swa_more_heads_tp1_to_2": swa(tp=(1, 2), kv_heads=1, window_heads=2),
    "swa_fewer_heads_tp2_to_1": swa(tp=(2, 1), kv_heads=4, window_heads=1),
    "mamba": mamba(),
    "mamba_tp2_to_2": mamba(tp=(2, 2)),
    "short_convolution": mamba(hybrid="conv"),
}


SWA_DRAFT = swa((2, 2))
if not SINCE_0_5_18:
    RIGHT["swa_draft"] = SWA_DRAFT


@alternate_backends(RIGHT)
def test_state_arrives(serve, backend, name):
    with serve(with_backend(backend, RIGHT[name])) as servers:
        assert_all_right(servers)
        assert_no_room_kept(servers, seconds=0)
        assert_heads_moved(servers)


# The first stage's pool has one extra layer: one with full attention, or one with a window.
SWA_STAGES = {
    "full": swa(pp=(2, 1)),
    "window": swa(pp=(2, 1), stages=(2, 4)),
    "pp3_tp2_to_1": swa(tp=(2, 1), pp=(3, 1)),
    "pp2_to_pp2": swa(pp=(2, 2)),
}


def first_stage_last(servers, src, dst):
    """Sends one request stage by stage, the first stage last, so that its writes are final."""
    room = next(servers.rooms)
    with ThreadPoolExecutor(servers.fleet.size) as pool:
        received = [pool.submit(servers.receive, rank, room, dst, 10) for rank in servers.decode]
        for stage in reversed(range(servers.fleet.prefill.pp)):
            ranks = [rank for rank in servers.prefill if rank.config["pp_rank"] == stage]
            for sent in [pool.submit(servers.send, one, room, src, None, 10) for one in ranks]:
                sent.result()
        return [future.result() for future in received]


@alternate_backends(SWA_STAGES)
def test_sliding_window_stages(serve, backend, name):
    with serve(with_backend(backend, SWA_STAGES[name])) as servers:
        for src, dst, _ in REQUESTS[:3]:
            for answer in first_stage_last(servers, src, dst):
                assert answer["state"] == "right", (src, dst, answer)
        assert_all_right(servers)
        assert_heads_moved(servers)


@pytest.mark.parametrize(
    "name, backend",
    [pytest.param("full", "nixl", marks=pytest.mark.nightly), ("window", "mooncake")],
)
def test_stock_sliding_window_stages(serve, backend, name):
    with serve(with_backend(backend, SWA_STAGES[name]), "stock", "stock") as servers:
        (answer,) = first_stage_last(servers, *SCATTERED)
    # Over NIXL, later stock engines do not support pipeline stages with these pools.
    ends = "hang" if SINCE_0_5_18 and backend == "nixl" else "wrong"
    assert answer["state"] == ends, answer


# (fleet, the request's state pages, states of that request and of the next one on stock 0.5.9).
# Stock's thread crashes if NumPy cannot pair the two page lists.
STATE_PAGE_LISTS = {"nsa": (nsa(), 5, ("hang", "hang")), "swa": (swa(), 2, ("wrong", "right"))}


def request_with_short_state_list(serve, fleet, engine, seconds=10):
    """Sends a request whose decode state list lacks its first page, and then a normal one.

    Returns the first request's outcome and the second one's state.
    """
    with serve(fleet, engine, engine) as servers:
        servers.prefill[0].call("use_bad_indices", what="window")
        outcome = servers.request(*SCATTERED, seconds=seconds)
        servers.prefill[0].call("use_bad_indices", what="")
        return outcome, servers.request(*SCATTERED, seconds=seconds).state


@pytest.mark.parametrize(
    "name, backend", [("nsa", "mooncake"), ("swa", "mooncake"), ("swa", "ascend")]
)
def test_unequal_state_page_lists_fail(serve, backend, name):
    """The lists pair by position, so the missing page is unknown. On NPUs index keys are KV."""
    fleet, pages, _ = STATE_PAGE_LISTS[name]
    outcome, following = request_with_short_state_list(
        serve, with_backend(backend, fleet), "patched"
    )
    assert_failed(outcome, f"prefill sends {pages} pages")
    assert f"decode has set aside {pages - 1};" in outcome.reasons
    assert following == "right"


@pytest.mark.parametrize("name", STATE_PAGE_LISTS)
def test_stock_truncates_unequal_state_page_lists(serve, name):
    """Stock writes the state one page off."""
    fleet, _, ends_0_5_9 = STATE_PAGE_LISTS[name]
    ends = ("wrong", "right") if SINCE_0_5_18 else ends_0_5_9
    seconds = HANG_SECONDS if ends[0] == "hang" else 10
    outcome, following = request_with_short_state_list(
        serve, with_backend("mooncake", fleet), "stock", seconds
    )
    assert (outcome.state, following) == ends, outcome
    assert ends[0] == "hang" or "state" in outcome.reasons


RECURRENT = {"tp2_to_1": (2, 1), "tp1_to_2": (1, 2)}


@only_0_5_9("later ones say where each convolution begins")
@pytest.mark.parametrize("name", RECURRENT)
def test_fused_convolutions_are_not_split(serve, name):
    """x, B and C follow each other, so a slice of all is not a rank's slice of each of them."""
    with serve(with_backend("mooncake", mamba(RECURRENT[name]))) as servers:
        outcome = servers.request(*SCATTERED)
    assert outcome.state == "failed", outcome
    assert "use the same TP size for this model" in outcome.reasons


@pytest.mark.parametrize("name", RECURRENT)
def test_stock_splits_fused_convolutions_wrongly(serve, name):
    with serve(with_backend("mooncake", mamba(RECURRENT[name])), "stock", "stock") as servers:
        outcome = servers.request(*SCATTERED)
    assert outcome.state == "wrong", outcome
    assert "state_conv" in outcome.reasons and "state_temporal" not in outcome.reasons


FUSED = pytest.param(
    "mamba", marks=pytest.mark.skipif(not SINCE_0_5_18, reason="0.5.9 refuses them")
)


@pytest.mark.parametrize("hybrid", ["conv", FUSED])
@pytest.mark.parametrize("name", RECURRENT)
def test_convolutions_are_split(serve, name, hybrid):
    """The engine's Mooncake code splits a single one; of fused ones, x, B and C are each split."""
    with serve(with_backend("mooncake", mamba(RECURRENT[name], hybrid))) as servers:
        assert_all_right(servers)


ONE_SIDED = {
    "prefill": nsa((1, 0)),
    "prefill_pp2": nsa((1, 0), pp=(2, 1), layers=5),
    "decode": nsa((0, 1)),
    "decode_pp2": nsa((0, 1), pp=(2, 1), layers=5),
    "decode_pp2_to_pp2": nsa((0, 1), pp=(2, 2), layers=5),
}


@alternate_backends(ONE_SIDED)
def test_draft_on_one_side_is_left_out(serve, fork_server, backend, name):
    """Prefill leaves out a draft that only one side has, and logs it once per decode rank."""
    log = fork_server("patched").log
    begins = log.stat().st_size
    with serve(with_backend(backend, ONE_SIDED[name])) as servers:
        assert_all_right(servers)
    said = log.read_bytes()[begins:].decode()
    who = "decode has no" if name.startswith("prefill") else "prefill has no"
    assert said.count(f"{who} draft model") == said.count("draft model") == 1, said


# Stock alone, and with a patched server on either side, because a rollout goes server by server.
ENGINES = [("stock", "stock"), ("stock", "patched"), ("patched", "stock")]
# Later stock engines send all state but a draft's windows, and so do the patched ones.
UNWRITTEN_BY = [*ENGINES, ("patched", "patched")] if SINCE_0_5_18 else ENGINES
NSA_DRAFTS = () if SINCE_0_5_18 else ("nsa_draft", "nsa_draft_pp2_odd", "nsa_draft_pp2_to_pp2")
UNWRITTEN = {**{name: RIGHT[name] for name in NSA_DRAFTS}, "swa_draft": SWA_DRAFT}


def assert_draft_state_unwritten(serve, fleet, engines):
    """Asserts that only the draft's state is wrong; the draft's KV is right.

    The exception is the hidden states of a stock stage without draft layers, because that stage
    looks like one without a draft model. No 0.5.9 server speculates with pipeline stages.
    """
    with serve(fleet, *engines) as servers:
        outcome = servers.request(*SCATTERED, seconds=30)
    assert outcome.state == "wrong", outcome
    wrong = "; ".join(answer["reason"] for answer in outcome.decode if answer["reason"])
    components = ("state_k", "state_v") if fleet.hybrid else ("state",)
    expected = {str((component, True, 0)) for component in components}
    if engines == ("patched", "stock") and fleet.decode.pp > 1:
        expected.add("metadata row 8")
    assert {part.split(":")[0] for part in wrong.split("; ")} == expected


@pytest.mark.parametrize("engines", UNWRITTEN_BY, ids="->".join)
@alternate_backends(UNWRITTEN)
def test_stock_leaves_draft_state_unwritten(serve, backend, name, engines):
    assert_draft_state_unwritten(serve, with_backend(backend, UNWRITTEN[name]), engines)


@only_0_5_9("later ones send an NSA draft's state")
@pytest.mark.parametrize("backend", BACKENDS)
def test_stock_alone_leaves_draft_state_unwritten(serve, backend):
    fleet = with_backend(backend, RIGHT["nsa_draft_pp3_uneven"])
    assert_draft_state_unwritten(serve, fleet, ENGINES[0])


MIXED = {
    "nsa": nsa(),
    "nsa_pp2_odd": nsa(pp=(2, 1), layers=7),
    "nsa_pp2_to_pp2": nsa(pp=(2, 2), layers=5),
    "swa": swa(),
    "mamba_tp2_to_2": RIGHT["mamba_tp2_to_2"],
}


@pytest.mark.parametrize("engines", ENGINES, ids="->".join)
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.nightly
def test_mixed_fleet_transfers_state(serve, backend, name, engines):
    if IS_0_5_18 and (backend, name, engines[0]) == ("nixl", "nsa_pp2_odd", "stock"):
        pytest.skip("stock 0.5.18's prefill supports no stages of MLA over NIXL")
    with serve(with_backend(backend, MIXED[name]), *engines) as servers:
        assert_all_right(servers)


DRAFT_ON_ONE_SIDE = {
    **{name: ONE_SIDED[name] for name in ("prefill", "prefill_pp2", "decode_pp2")},
    "prefill_pp2_as_many_as_decode": nsa((1, 0), pp=(2, 1), stages=(1, 3)),
}


@alternate_backends(DRAFT_ON_ONE_SIDE)
def test_draft_on_one_side_with_stock_decode(serve, backend, name):
    """Prefill's last stage may have as many state buffers as decode, which has all layers."""
    with serve(with_backend(backend, DRAFT_ON_ONE_SIDE[name]), "patched", "stock") as servers:
        assert_all_right(servers)


# 0.5.9's sender indexes past decode's layers, or refuses to split windows by heads: over NIXL the
# scheduler raises, over Mooncake the transfer thread crashes. So it does in 0.5.18, where over NIXL
# the thread that reads registrations crashes, or the transfer fails on prefill alone.
STOCK_FLEETS = {"draft_on_prefill": ONE_SIDED["prefill"], "swa_tp2_to_1": RIGHT["swa_tp2_to_1"]}
STOCK_ENDS = {
    "draft_on_prefill": {"nixl": "hang", "mooncake": "failed"},
    "swa_tp2_to_1": dict.fromkeys(BACKENDS, "right"),
}
if not SINCE_0_5_18:
    STOCK_ENDS = dict.fromkeys(STOCK_ENDS, {"nixl": "raised", "mooncake": "hang"})
if IS_0_5_18:
    STOCK_ENDS = {
        "draft_on_prefill": dict.fromkeys(BACKENDS, "hang"),
        "swa_tp2_to_1": {"nixl": "failed", "mooncake": "hang"},
    }


@alternate_backends(STOCK_ENDS)
def test_stock_with_draft_or_window_split(serve, backend, name):
    end = STOCK_ENDS[name][backend]
    seconds = 8 if end == "right" else HANG_SECONDS
    with serve(with_backend(backend, STOCK_FLEETS[name]), "stock", "stock") as servers:
        outcome = servers.request(*SCATTERED, seconds=seconds)
    assert outcome.state == end, outcome
