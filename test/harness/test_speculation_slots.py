"""Slots of drafted tokens as the kernels are documented; two requests, in rows 2 and 0."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pd_harness.cpu_host import speculation_slots as slots  # noqa: E402

ROWS = torch.tensor([2, 0])
START, END = torch.tensor([1, 3]), torch.tensor([3, 4])
WIDTH = 6


def table() -> torch.Tensor:
    """Returns a table whose row r has the slots 10 r, 10 r + 1 and so on."""
    return 10 * torch.arange(3, dtype=torch.int32)[:, None] + torch.arange(WIDTH, dtype=torch.int32)


def test_new_slots_are_assigned():
    rows = table()
    slots.assign_req_to_token_pool_cpu(ROWS, rows, START, END, torch.tensor([70, 71, 72]), WIDTH)
    assert rows[2].tolist() == [20, 70, 71, 23, 24, 25]
    assert rows[0].tolist() == [0, 1, 2, 72, 4, 5]
    assert rows[1].tolist() == table()[1].tolist()


def test_extend_cache_locs_are_read():
    found = torch.full((4,), -1)
    slots.assign_extend_cache_locs_cpu(ROWS, table(), START, END, found, WIDTH)
    assert found.tolist() == [21, 22, 3, -1]


def test_draft_cache_locs_follow_existing_tokens():
    found = torch.empty(4, dtype=torch.int64)
    slots.assign_draft_cache_locs_contiguous_cpu(ROWS, table(), START, found, WIDTH, 1, 2)
    assert found.tolist() == [21, 22, 3, 4]


def test_bonus_token_is_last_accepted():
    bonus = torch.empty(2, dtype=torch.int32)
    tokens = torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=torch.int32)
    slots.fill_bonus_tokens_cpu(tokens, torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [9, 4]


def test_accepted_tokens_keep_their_slots():
    found = torch.full((6,), -1)
    accepted = torch.tensor([[0, 1, -1], [3, -1, -1]])
    slots.fill_accept_out_cache_loc_cpu(accepted, 50 + torch.arange(6), found)
    assert found.tolist() == [50, 51, 53, -1, -1, -1]


def test_overlapping_rows_are_copied_correctly():
    buffer = torch.arange(8, dtype=torch.float32).view(4, 2)
    address, stride = torch.tensor([buffer.data_ptr()]), torch.tensor([8])
    slots.copy_all_layer_kv_cache_cpu(address, stride, torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert buffer.tolist() == [[0, 1], [0, 1], [2, 3], [6, 7]]


def test_module_gets_only_functions_it_defines():
    module = SimpleNamespace(fill_bonus_tokens_cpu=None, other_cpu=None)
    slots.install(module)
    assert module.fill_bonus_tokens_cpu is slots.fill_bonus_tokens_cpu
    assert vars(module).keys() == {"fill_bonus_tokens_cpu", "other_cpu"} and not module.other_cpu
