"""Compares the mapping of heads with heads listed one by one, also where stock fails."""

from itertools import product

import pytest
from kv_layout import LayoutError, heads_of_rank, heads_to_send, prefill_ranks_of, tp_size_conflict
from oracle import TOPOLOGIES, can_split, deal_heads

SIZES = range(1, 17)


@pytest.mark.parametrize("total", SIZES)
def test_heads_of_rank_match_dealt_heads(total):
    """Replicas of a head are on consecutive ranks; stock deals 0 1 0 1 where this is 0 0 1 1."""
    for ranks in filter(lambda ranks: can_split(total, ranks), SIZES):
        for rank, hand in enumerate(deal_heads(total, ranks)):
            heads = heads_of_rank(rank, ranks, total)
            assert (list(range(heads.start, heads.stop)), heads.total) == (hand, total), (
                ranks,
                rank,
            )


def test_model_without_kv_heads_sends_none():
    """A model with only recurrent layers: no rank holds heads, and none are sent."""
    assert all(heads_of_rank(rank, 4, 0).count == 0 for rank in range(4))
    none = heads_of_rank(0, 4, 0)
    assert heads_to_send(none, heads_of_rank(0, 2, 0), (0, 4), (0, 2)).count == 0


@pytest.mark.parametrize("total", SIZES[1:])
def test_indivisible_kv_heads_are_refused(total):
    others = [ranks for ranks in SIZES if not can_split(total, ranks)]
    assert others
    for ranks in others:
        with pytest.raises(LayoutError, match=rf"{total} KV heads .* TP size {ranks}"):
            heads_of_rank(0, ranks, total)


@pytest.mark.parametrize("prefill", SIZES)
def test_each_decode_head_has_exactly_one_writer(prefill):
    chosen = [topology for topology in TOPOLOGIES if topology[0] == prefill]
    assert len(chosen) >= 3
    for topology in chosen:
        check_one_writer_per_head(*topology)


def check_one_writer_per_head(prefill, decode, total):
    for rank, hand in enumerate(deal_heads(total, decode)):
        written = []
        for sender in prefill_ranks_of(rank, prefill, decode):
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
def test_every_prefill_rank_is_connected(prefill):
    for decode in filter(lambda decode: can_split(prefill, decode), SIZES):
        served_by = [prefill_ranks_of(d, prefill, decode) for d in range(decode)]
        serving = [rank for ranks in served_by for rank in ranks]
        assert set(serving) == set(range(prefill)), decode
        assert len(serving) == max(prefill, decode), decode


def test_conflict_of_indivisible_tp_sizes_names_both():
    for prefill, decode in product(SIZES, SIZES):
        conflict = tp_size_conflict(prefill, decode)
        assert (conflict is None) == can_split(prefill, decode), (prefill, decode)
        if conflict:
            assert f"prefill attention TP size {prefill} " in conflict
            assert f"decode attention TP size {decode}:" in conflict


def test_replicated_head_is_written_by_its_first_rank():
    shares = [
        heads_to_send(heads_of_rank(p, 4, 2), heads_of_rank(0, 1, 2), (p, 4), (0, 1))
        for p in range(4)
    ]
    assert [share.count for share in shares] == [1, 0, 1, 0]
