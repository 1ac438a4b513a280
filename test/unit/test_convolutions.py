"""Channels of convolutions that share a buffer; every rank holds all channels of some of them."""

from itertools import product

import pytest
from kv_layout.convolutions import replicates_bc, slice_blocks_with_shared_bc

X, B = 16, 3
SIZES = [1, 2, 4, 8]
PAIRS = [(p, d) for p, d in product(SIZES, SIZES) if p != d]


def channels_of(rank: int, size: int) -> list[str]:
    """Names of a rank's channels."""
    own = [f"x{n}" for n in range(X) if n // (X // size) == rank]
    return own + [f"{part}{n}" for part in "BC" for n in range(B)]


@pytest.mark.parametrize("prefill, decode", PAIRS)
def test_each_channel_is_written_once(prefill, decode):
    for rank in range(decode):
        target = channels_of(rank, decode)
        written = [None] * len(target)
        for sender in range(prefill):
            if sender * decode // prefill != rank and rank * prefill // decode != sender:
                continue
            source = channels_of(sender, prefill)
            for start, to, count in slice_blocks_with_shared_bc(
                [X, B, B], (sender, prefill), (rank, decode)
            ):
                assert count > 0
                for n in range(count):
                    assert written[to + n] is None
                    written[to + n] = source[start + n]
        assert written == target


@pytest.mark.parametrize("size", SIZES)
def test_replicated_bc_is_detected_from_channel_count(size):
    assert replicates_bc([X, B, B], size, len(channels_of(0, size)))
    assert replicates_bc([X, 8, 8], size, (X + 16) // size) == (size == 1)
    assert not replicates_bc([X], size, X // size)
    assert not replicates_bc([], size, 0)
