"""Head mapping against heads dealt out like cards; the stock engine's failing inputs by name."""

import pytest
from kv_layout import (
    Heads,
    LayoutError,
    connected_prefill_ranks,
    heads_of_rank,
    heads_to_send,
    tp_size_conflict,
)
from oracle import TOPOLOGIES, deal_heads, splittable

SIZES = range(1, 17)


@pytest.mark.parametrize("total", SIZES)
def test_a_rank_holds_the_heads_it_is_dealt(total):
    for ranks in filter(lambda ranks: splittable(total, ranks), SIZES):
        for rank, hand in enumerate(deal_heads(total, ranks)):
            heads = heads_of_rank(rank, ranks, total)
            assert list(range(heads.start, heads.stop)) == hand, (ranks, rank)


def test_a_model_without_kv_heads():
    """One with recurrent layers alone: each rank holds none, and none is sent."""
    assert all(heads_of_rank(rank, 4, 0).count == 0 for rank in range(4))
    none = heads_of_rank(0, 4, 0)
    assert heads_to_send(none, heads_of_rank(0, 2, 0), (0, 4), (0, 2)).count == 0


@pytest.mark.parametrize("total", SIZES[1:])
def test_heads_that_no_engine_splits_are_refused(total):
    others = [ranks for ranks in SIZES if not splittable(total, ranks)]
    assert others
    for ranks in others:
        with pytest.raises(LayoutError, match=rf"{total} KV heads .* TP size {ranks}"):
            heads_of_rank(0, ranks, total)


@pytest.mark.parametrize("prefill", SIZES)
def test_each_decode_head_has_exactly_one_writer(prefill):
    chosen = [topology for topology in TOPOLOGIES if topology[0] == prefill]
    assert len(chosen) >= 3
    for topology in chosen:
        one_writer_for_each_head(*topology)


def one_writer_for_each_head(prefill, decode, total):
    for rank, hand in enumerate(deal_heads(total, decode)):
        written = []
        for sender in connected_prefill_ranks(rank, prefill, decode):
            share = heads_to_send(
                heads_of_rank(sender, prefill, total),
                heads_of_rank(rank, decode, total),
                (sender, prefill),
                (rank, decode),
            )
            written += range(share.start, share.stop)
            assert set(range(share.start, share.stop)) <= set(deal_heads(total, prefill)[sender])
        assert written == hand


@pytest.mark.parametrize("prefill", SIZES)
def test_connections_are_complete(prefill):
    for decode in filter(lambda decode: splittable(prefill, decode), SIZES):
        assert tp_size_conflict(prefill, decode) is None
        served_by = [connected_prefill_ranks(d, prefill, decode) for d in range(decode)]
        serving = [rank for ranks in served_by for rank in ranks]
        assert set(serving) == set(range(prefill)), decode
        assert len(serving) == max(prefill, decode), decode


def test_sizes_that_do_not_divide_are_a_conflict():
    for prefill in SIZES:
        for decode in SIZES:
            conflict = tp_size_conflict(prefill, decode)
            assert (conflict is None) == splittable(prefill, decode), (prefill, decode)


@pytest.mark.parametrize(
    "total, ranks, dealt",
    [
        (4, 8, [0, 0, 1, 1, 2, 2, 3, 3]),  # stock: rank % heads, 0 1 2 3 0 1 2 3
        (2, 4, [0, 0, 1, 1]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_replicas_are_neighbours(total, ranks, dealt):
    assert [heads_of_rank(rank, ranks, total) for rank in range(ranks)] == [
        Heads(head, head + 1, total) for head in dealt
    ]


def test_a_replicated_head_is_written_once():
    shares = [
        heads_to_send(heads_of_rank(p, 4, 2), heads_of_rank(0, 1, 2), (p, 4), (0, 1))
        for p in range(4)
    ]
    assert [share.count for share in shares] == [1, 0, 1, 0]


def test_sizes_that_do_not_divide_are_named():
    assert tp_size_conflict(2, 4) is None
    conflict = tp_size_conflict(3, 2)
    assert "prefill attention TP size 3" in conflict
    assert "decode attention TP size 2" in conflict
