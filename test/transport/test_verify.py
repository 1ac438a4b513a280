"""`SGLANG_PD_VERIFY`: right KV passes; wrong KV fails with a reason that names what and where."""

import random

import pytest
from engine_release import SINCE_0_5_18
from error_texts import says_another_rank_failed
from fleet import Fleet, Outcome, Side
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_checks import (
    REQUESTS,
    assert_all_right,
    assert_heads_moved,
    assert_no_room_kept,
    assert_right,
    nightly_except,
    only_0_5_9,
    reduce_polls,
)
from transport_cases import (
    ASCEND,
    HEADS,
    NSA,
    STAGES,
    STOCK,
    same_widths,
    tp,
    with_environment,
    with_fields,
)

from pd_harness.cluster import engine_folder, skip_reason

pytestmark = pytest.mark.transport

BACKENDS = ["nixl", "mooncake", "ascend"]
SRC, DST = [1, 2, 3, 4], [4, 5, 6, 7]
# Later releases send a recurrent model's pools and state layer by layer with the engine's code.
COMPARED_STATE = ["swa"] if SINCE_0_5_18 else ["swa", "mamba"]
MANY_PAGES = 100_000


def verifying(fleet: Fleet, mode: str = "1") -> Fleet:
    return with_environment(fleet, SGLANG_PD_VERIFY=mode)


def end_of_corrupted_request(servers, rank, what: str) -> Outcome:
    """Sends a request, of which this rank corrupts what `TransferCorruptions` says."""
    rank.call("corrupt_transfers", what=what)
    outcome = servers.request(SRC, DST)
    rank.call("corrupt_transfers", what="")
    return outcome


RIGHT = {
    **{f"nixl-{name}": HEADS[name] for name in ("tp1_to_1", "tp2_to_1", "tp1_to_2")},
    "nixl-replicated_on_prefill": HEADS["tp4_to_1_replicated_on_prefill"],
    "nixl-replicated_on_decode": HEADS["tp2_to_4_replicated_on_decode"],
    **{f"nixl-{name}": STAGES[name] for name in ("pp2_tp2_to_1", "pp2_to_pp2", "nsa_pp2_odd")},
    **{f"nixl-{name}": STAGES[name] for name in ("draft_on_decode", "draft_on_prefill")},
    "nixl-draft_unequal": STAGES["draft_unequal_tp2_to_1"],
    "mooncake-pp2_odd": with_fields(STAGES["pp2_odd"], backend="mooncake"),
    "mooncake-tp2_to_1": with_fields(HEADS["tp2_to_1"], backend="mooncake"),
    "ascend-mla_index_keys_draft": ASCEND["mla_index_keys_draft_unequal"],
    "ascend-fia_tp2_to_1": ASCEND["fia_tp2_to_1"],
}


@pytest.mark.parametrize("name", nightly_except(RIGHT, "nixl-tp2_to_1", "mooncake-pp2_odd"))
def test_valid_kv_passes(serve, name):
    with serve(verifying(RIGHT[name])) as servers:
        assert_all_right(servers)
        for rank in servers.decode:
            compared = rank.call("verify_results")["pairs"]
            assert {count["requests"] for count in compared.values()} == {len(REQUESTS)}
            assert sum(count["bytes"] for count in compared.values()) > 0
            assert {count["mismatches"] for count in compared.values()} == {0}
        assert_no_room_kept(servers)
        assert_heads_moved(servers)


@pytest.mark.parametrize("hybrid", COMPARED_STATE)
@pytest.mark.parametrize("backend", nightly_except(["nixl", "mooncake"], "nixl"))
def test_state_is_compared(serve, backend, hybrid):
    """Two of four layers have state: a window's K and V, or a convolution and a recurrence."""
    with serve(verifying(Fleet(backend=backend, hybrid=hybrid, layers=4))) as servers:
        assert_right(servers, SRC, DST)
        (count,) = servers.decode[0].call("verify_results")["pairs"].values()
        assert count["parts"] == 2 * 2 + 2 * 2


@pytest.mark.skipif(not SINCE_0_5_18, reason="0.5.9 compares it")
def test_unverifiable_state_is_refused(serve):
    with (
        pytest.raises(RuntimeError, match="cannot compare KV with unsupported pools"),
        serve(verifying(Fleet(hybrid="mamba", layers=4))),
    ):
        pass


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_prompt_of_many_pages(serve, backend):
    """One message carries a digest of each page, here 800 kB."""
    small = {"layers": 1, "page_size": 1, "kv_heads": 1, "v_width": 4}
    pages = (list(range(MANY_PAGES)), list(range(1, MANY_PAGES + 1)))
    with serve(verifying(Fleet(backend=backend, pages=MANY_PAGES + 1, **small))) as servers:
        outcome = servers.request(*pages)
        assert outcome.state == "right", outcome.state
        servers.prefill[0].call("corrupt_transfers", what="last token")
        outcome = servers.request(*pages)
        assert f"first wrong page {MANY_PAGES - 1} of {MANY_PAGES}" in outcome.decode[0]["reason"]


CORRUPTIONS = {
    "pages": ("k, layer 0", "first wrong page 0 of 4 (tokens 0 to 15 of those sent), 4 in all"),
    "another": ("k, layer 0", "first wrong page 0 of 4 (tokens 0 to 15 of those sent), 1 in all"),
    "layers": ("k, layer 0", "and 1 more of 4 parts; first wrong page 0 of 4"),
    "heads": ("k, layer 0", "first wrong page 0 of 4"),
    "last token": (
        "k, layer 0",
        "first wrong page 3 of 4 (tokens 48 to 63 of those sent), 1 in all",
    ),
    "byte": (
        "v, layer 1",
        "of 4 parts; first wrong page 0 of 4 (tokens 0 to 15 of those sent), 1 in all",
    ),
}


@pytest.mark.parametrize("what", nightly_except(CORRUPTIONS, "pages", "layers", "heads", "byte"))
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_corrupted_kv_fails_its_request(serve, backend, what):
    with serve(verifying(Fleet(backend=backend, v_width=4))) as servers:
        assert_right(servers, SRC, DST)
        (rank,) = servers.decode if what == "byte" else servers.prefill
        outcome = end_of_corrupted_request(servers, rank, what)
        (decode,) = outcome.decode
        assert decode["state"] == "failed", outcome
        part, where = CORRUPTIONS[what]
        for said in ("KV verification failed: ", part, where, "(prefill TP 0/1 PP 0/1, "):
            assert said in decode["reason"], outcome
        differing = servers.decode[0].call("verify_results")["differing"]
        assert all("(prefill TP 0/1 PP 0/1, decode " in one for one in differing), differing
        assert any(one.startswith(part) for one in differing), differing
        assert set(differing.values()) == {1}, differing
        assert_right(servers, SRC, DST)


# By what is wrong: TP sizes of prefill and decode, and which side does it.
WRONGLY_PACKED = {
    "not interleaved": (2, 1, "decode"),
    "interleaved twice": (2, 1, "decode"),
    "parts swapped": (2, 1, "decode"),
    "not packed": (1, 2, "prefill"),
    "other tokens": (1, 2, "prefill"),
}


@pytest.mark.parametrize("what", WRONGLY_PACKED)
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_wrongly_packed_kv_fails_its_request(serve, backend, what):
    *sizes, side = WRONGLY_PACKED[what]
    with serve(verifying(tp(*sizes, backend=backend, v_width=4))) as servers:
        assert_right(servers, SRC, DST)
        (rank,) = getattr(servers, side)
        outcome = end_of_corrupted_request(servers, rank, what)
        for decode in outcome.decode:
            assert decode["state"] == "failed", outcome
            assert "KV verification failed: " in decode["reason"], outcome
            where = "first wrong page 0 of 4 (tokens 0 to 15 of those sent), 4 in all"
            assert where in decode["reason"], outcome
        assert_right(servers, SRC, DST)
        assert_heads_moved(servers)


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_mismatch_on_one_rank_fails_all_ranks(serve, backend):
    """The other TP rank's KV is right; both fail the room, and serve the next one."""
    fleet = verifying(Fleet(Side(tp=2), Side(tp=2), backend=backend, v_width=4))
    with serve(fleet) as servers:
        reduce_polls(servers.decode)
        assert_right(servers, SRC, DST)
        outcome = end_of_corrupted_request(servers, servers.decode[1], "byte")
        assert [end["state"] for end in outcome.decode] == ["failed"] * 2, outcome
        assert "KV verification failed" in outcome.decode[1]["reason"], outcome
        assert says_another_rank_failed(outcome.decode[0]["reason"], backend), outcome
        assert_right(servers, SRC, DST)
        assert_no_room_kept(servers)


WRONG_ON_STOCK = [name for name, (_, state) in STOCK.items() if state == "wrong"]
NSA_DRAFT = Fleet(Side(draft_layers=1), Side(draft_layers=1), layers=4, **NSA)


def with_stock_transfer(fleet: Fleet, mode: str) -> Fleet:
    """Returns a patched fleet whose prefill ranks send with the stock engine's code.

    Skips the test if there is no stock engine.
    """
    if reason := skip_reason(fleet.backend, fleet.size, ("patched", "stock")):
        pytest.skip(reason)
    variables = {"SGLANG_PD_STOCK_TRANSFER": str(engine_folder("stock")), "SGLANG_PD_PACKED": "0"}
    fleet = verifying(same_widths(fleet), mode)
    environment = {**fleet.prefill.environment, **variables}
    return with_fields(fleet, prefill=with_fields(fleet.prefill, environment=environment))


def reported_mismatches(servers) -> list[str]:
    return ["; ".join(rank.call("verify_results")["said"]) for rank in servers.decode]


COMPARED_STOCK = [
    name for name, (_, state) in STOCK.items() if state != "raised"
]  # a request whose transfer raises fails without a comparison


@only_0_5_9("a later prefill cannot send by stock's code")
@pytest.mark.parametrize("name", [*COMPARED_STOCK, "nixl-nsa_draft", "mooncake-nsa_draft"])
def test_verify_agrees_with_byte_comparison(serve, name):
    """With `log`, the request is served, and a mismatch is reported only if a byte is wrong."""
    nsa_draft = with_fields(NSA_DRAFT, backend=name.split("-")[0])
    fleet = STOCK[name][0] if name in STOCK else nsa_draft
    with serve(with_stock_transfer(fleet, "log")) as servers:
        outcome = servers.request([9, 2, 3], [0, 1, 2], seconds=8)
        said = reported_mismatches(servers)
    judged = ["wrong" if text else "right" for text in said]
    assert judged == [answer["state"] for answer in outcome.decode], (outcome, said)
    if name in WRONG_ON_STOCK or name not in STOCK:
        assert "wrong" in judged


ONE_SIDED = [
    ("prefill", "patched", "patched"),
    ("prefill", "patched", "stock"),
    ("decode", "patched", "patched"),
    ("decode", "stock", "patched"),
]


@pytest.mark.parametrize("side, prefill, decode", ONE_SIDED)
@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "mooncake"))
def test_peer_without_verification_is_served(serve, backend, side, prefill, decode):
    verifies = Side(environment={"SGLANG_PD_VERIFY": "1"})
    with serve(Fleet(backend=backend, v_width=4, **{side: verifies}), prefill, decode) as servers:
        assert_all_right(servers)


UNAVAILABLE = {
    "no digests": "a prefill rank sent no digests or could not compute them; its log may say why",
    "junk digests": "digests of 5 bytes cannot be read",
}


@pytest.mark.parametrize("backend", nightly_except(BACKENDS, "nixl"))
def test_unavailable_digests_fail_their_request(serve, backend):
    with serve(verifying(Fleet(backend=backend, v_width=4))) as servers:
        for what, said in UNAVAILABLE.items():
            outcome = end_of_corrupted_request(servers, servers.prefill[0], what)
            assert outcome.decode[0]["state"] == "failed", outcome
            assert said in outcome.reasons
        assert_right(servers, SRC, DST)


@st.composite
def fleets(draw) -> Fleet:
    """Draws a compatible pair of servers: heads or MLA, stages, drafts on either side."""
    backend = draw(st.sampled_from(BACKENDS))
    mla = draw(st.booleans())
    heads = draw(st.sampled_from([1, 2, 4]))
    tp = [draw(st.sampled_from([1, 2, 4])) for _ in range(2)]
    layers = draw(st.integers(1, 5))
    pp = draw(st.integers(1, min(3, layers)))
    decode_pp = draw(st.sampled_from([1, pp]))
    drafts = [draw(st.sampled_from([0, 0, 1, 2])) for _ in range(2)]
    indexed = mla and draw(st.booleans())
    size = 64 if indexed and backend != "ascend" else draw(st.sampled_from([1, 4, 16]))
    return Fleet(
        Side(tp=tp[0], pp=pp, draft_layers=drafts[0]),
        Side(tp=tp[1], pp=decode_pp, draft_layers=drafts[1]),
        backend=backend,
        kv_heads=heads,
        layers=layers,
        page_size=size,
        v_width=4 if backend == "ascend" and not mla else draw(st.sampled_from([2, 4])),
        mla=mla,
        index_keys=indexed,
        fia=backend == "ascend" and not mla and draw(st.booleans()),
    )


NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "examples, requests",
    [
        (2 if SINCE_0_5_18 else 5, 10),
        pytest.param(15, 100, marks=NIGHTLY),
    ],
    ids=["few", "many"],
)
def test_verify_has_no_false_alarms(serve, examples, requests):
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(fleet=fleets(), seed=st.integers(0, 1 << 32))
    def all_right(fleet, seed):
        rng = random.Random(seed)
        with serve(verifying(fleet)) as servers:
            for _ in range(requests):
                count = rng.randint(1, 6)
                src, dst = (rng.sample(range(fleet.pages), count) for _ in range(2))
                cut = rng.randint(1, count)
                chunks = [cut, count - cut] if cut < count else [count]
                assert_right(servers, src, dst, chunks)
            for rank in servers.decode:
                pairs = rank.call("verify_results")["pairs"].values()
                assert {pair["requests"] for pair in pairs} == {requests}
            assert_moves_heads(servers, fleet)

    all_right()


def assert_moves_heads(servers, fleet: Fleet) -> None:
    """Asserts that prefill packs heads for a larger decode TP, and decode interleaves a smaller's.

    With MLA, or as many KV heads on each rank of both sides, neither has anything to do. A draft
    may have other heads. Decode does not know whether prefill has one, and interleaves its own.
    """
    sent = interleaved = [heads_of_ranks(fleet, fleet.kv_heads)]
    of_draft = heads_of_ranks(fleet, fleet.draft_heads)
    if fleet.decode.draft_layers:
        interleaved = [*interleaved, of_draft]
        if fleet.prefill.draft_layers:
            sent = interleaved
    packs = any(rank.call("health")["packed"] for rank in servers.prefill)
    interleaves = any(rank.call("health")["interleaved"] for rank in servers.decode)
    assert packs == any(prefill > decode for prefill, decode in sent)
    assert interleaves == any(prefill < decode for prefill, decode in interleaved)


def heads_of_ranks(fleet: Fleet, heads: int) -> tuple[int, int]:
    """Returns how many of these KV heads a rank of prefill holds, and one of decode."""
    if fleet.mla:
        return (1, 1)
    return tuple(max(1, heads // side.tp) for side in (fleet.prefill, fleet.decode))
