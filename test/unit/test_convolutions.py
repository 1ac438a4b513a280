"""Channels of convolutions that share a buffer, where every rank has all of some of them."""

from itertools import product

import pytest
from kv_layout.convolutions import blocks_of_shared_group, shares_group

X, B = 16, 3
SIZES = [1, 2, 4, 8]
PAIRS = [(p, d) for p, d in product(SIZES, SIZES) if p != d]


def held(rank: int, size: int) -> list[str]:
    """Names of a rank's channels."""
    own = [f"x{n}" for n in range(X) if n // (X // size) == rank]
    return own + [f"{part}{n}" for part in "BC" for n in range(B)]


@pytest.mark.parametrize("prefill, decode", PAIRS)
def test_each_channel_is_written_once(prefill, decode):
    for rank in range(decode):
        target = held(rank, decode)
        written = [None] * len(target)
        for sender in range(prefill):
            if sender * decode // prefill != rank and rank * prefill // decode != sender:
                continue
            source = held(sender, prefill)
            for start, to, count in blocks_of_shared_group(
                [X, B, B], (sender, prefill), (rank, decode)
            ):
                assert count > 0
                for n in range(count):
                    assert written[to + n] is None
                    written[to + n] = source[start + n]
        assert written == target


@pytest.mark.parametrize("size", SIZES)
def test_whether_a_rank_has_all_of_b_and_c_shows_in_its_channels(size):
    assert shares_group([X, B, B], size, len(held(0, size)))
    assert shares_group([X, 8, 8], size, (X + 16) // size) == (size == 1)
    assert not shares_group([X], size, X // size)
    assert not shares_group([], size, 0)
