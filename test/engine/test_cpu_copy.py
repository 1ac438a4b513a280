"""Copies KV to the host and back to other slots, and checks every byte of every buffer."""

import engine_calls
import pytest
import torch
from cpu_copy_checks import as_tokens, assert_moved, fill, round_trip, snapshot
from engine_calls import POOLS
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("start_layer", [0, 3])
def test_round_trip_to_other_slots(kind, page_size, start_layer):
    """The last page is partly filled; a pipeline stage numbers its layers locally."""
    pool = POOLS[kind](page_size, start_layer)
    tokens = max(1, 2 * page_size - page_size // 2)
    source = list(range(page_size, page_size + tokens))
    target = list(range(3 * page_size, 3 * page_size + tokens))
    round_trip(pool, source, target)


@pytest.mark.parametrize("kind", POOLS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_round_trip_between_any_slots(kind, data):
    pool = POOLS[kind](data.draw(st.sampled_from([1, 4])))
    pool.cpu_offloading_chunk_size = data.draw(st.integers(1, 5))
    slots = st.integers(0, pool.size + pool.page_size - 1)
    count = data.draw(st.integers(0, pool.size))
    lists = st.lists(slots, min_size=count, max_size=count, unique=True)
    round_trip(pool, data.draw(lists), data.draw(lists))


@pytest.fixture
def fia_nz(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")


@pytest.mark.parametrize("kind", ["mla", "mla_index_keys"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 40])
def test_tile_major_pages_are_copied_whole(kind, tokens, fia_nz):
    """A token's bytes are spread over its page, and survive in a partly filled last page, too.

    Index keys are not spread, so a copy may include the rest of their pages or not.
    """
    pool = POOLS[kind](16)
    fill(pool)
    before = snapshot(pool)
    pages = [3, 1, 2][: -(-tokens // 16)]
    others = [4, 0, 3][: len(pages)]

    def slots(numbers):
        return [16 * page + slot for page in numbers for slot in range(16)]

    pool.cpu_offloading_chunk_size = 32
    source, target = slots(pages)[:tokens], slots(others)[:tokens]
    pool.load_cpu_copy(pool.get_cpu_copy(torch.tensor(source)), torch.tensor(target))
    assert_moved(pool, before, slots(pages), slots(others), but="index_k_buffer")
    for layer, buffer in enumerate(as_tokens(pool).get("index_k_buffer", ())):
        assert torch.equal(buffer[target], before["index_k_buffer"][layer][source])


@pytest.mark.parametrize("slots", [[17, 18], [16, 18], [16, 17, 33]], ids=str)
def test_partial_tile_major_page_is_refused(slots, fia_nz):
    with pytest.raises(ValueError, match="not whole pages of 16 tokens"):
        engine_calls.mla_pool(False, 16).get_cpu_copy(torch.tensor(slots))
