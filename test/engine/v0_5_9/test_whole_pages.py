"""Decode allocates no more than its free pages, though the engine counts tokens."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest

pytestmark = pytest.mark.engine

ENGINE = DecodePreallocQueue.__bases__[0]
PAGE, RESERVED = 8, 2


class Pages:
    """Replaces the allocator of a pool: whole pages, and None if too few are left."""

    page_size, device = PAGE, "cpu"

    def __init__(self, free: int):
        self.free = free

    def available_size(self) -> int:
        return self.free * PAGE

    def alloc_extend(self, extend_num_tokens: int, **_) -> torch.Tensor | None:
        pages = -(-extend_num_tokens // PAGE)
        if pages > self.free:
            return None
        self.free -= pages
        return torch.zeros(extend_num_tokens, dtype=torch.int64)


class Request(SimpleNamespace):
    """A request of some tokens, some of them already decoded."""

    def __init__(self, tokens: int, decoded: int = 0):
        super().__init__(
            rid=str(id(self)),
            origin_input_ids=[0] * (tokens - decoded),
            output_ids=[0] * decoded,
            sampling_params=SimpleNamespace(max_new_tokens=1),
            time_stats=SimpleNamespace(),
            finished_reason=None,
            req_pool_idx=0,
        )

    def nothing(self, *_, **__) -> None: ...

    load_kv_cache = add_latency = set_extend_input_len = nothing


def queue(kind: type, pages: int, **more) -> DecodePreallocQueue:
    made = object.__new__(kind)
    scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[]), waiting_queue=[], last_batch=None
    )
    slots = SimpleNamespace(available_size=lambda: 9, alloc=lambda *_: 0, write=lambda *_: None)
    slots.req_to_token = torch.zeros((1, 99), dtype=torch.int32)
    fields = dict(
        req_to_token_pool=slots,
        req_to_metadata_buffer_idx_allocator=slots,
        token_to_kv_pool=None,
        token_to_kv_pool_allocator=Pages(pages),
        scheduler=scheduler,
        transfer_queue=SimpleNamespace(queue=[]),
        kv_manager=None,  # it would note what happens
        num_reserved_decode_tokens=RESERVED,
        retracted_queue=[],
        queue=[],
        _update_handshake_waiters=lambda *_: None,
        **more,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def resume(kind: type, pages: int, *tokens: int) -> int:
    """Resumes retracted requests of so many tokens; returns how many fit."""
    made = queue(kind, pages)
    made.retracted_queue = [Request(some, decoded=1) for some in tokens]
    return len(made.resume_retracted_reqs())


def allocate(kind: type, pages: int, *tokens: int) -> int:
    """Allocates pages for new requests of so many tokens; returns how many fit."""
    made = queue(kind, pages)
    receiver = SimpleNamespace(init=lambda *_: None)
    made.queue = [DecodeRequest(Request(some), receiver, waiting_for_input=True) for some in tokens]
    return len(made.pop_preallocated()[0])


# Pages, requests' tokens (with those reserved, a request needs 2 more), and how many fit. A
# resumed request allocates one token less.
CASES = [
    (4, (10, 10), 2),
    (3, (10, 10), 1),
    (5, (10, 10, 10), 2),
    (6, (10, 10, 10), 3),
    (3, (22, 2), 1),  # one that fills the pool is not refused
    (3, (5, 5, 5), 3),
    (2, (5, 5, 5), 2),
    (1, (7, 1), 0),
]


@pytest.mark.parametrize("act", [resume, allocate])
@pytest.mark.parametrize("pages, tokens, fitting", CASES)
def test_requests_get_no_more_than_the_free_pages(act, pages, tokens, fitting):
    assert act(DecodePreallocQueue, pages, *tokens) == fitting


@pytest.mark.parametrize("act", [resume, allocate])
def test_stock_server_exits(act):
    with pytest.raises(AssertionError, match="KV cache is full"):
        act(ENGINE, 3, 10, 10)
