"""`SGLANG_PD_VERIFY`: its values, digests of pages, and reports to a bootstrap server."""

import asyncio
import json
import threading

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from sglang.srt.disaggregation.kv_layout import Buffer, Heads, LayoutError, Part, RankLayout
from sglang.srt.disaggregation.pd import page_digests, verify_reports
from sglang.srt.disaggregation.pd.page_digests import PageViews
from sglang.srt.disaggregation.pd.verify_mode import verify_mode
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from pd_harness.polling import wait_until

pytestmark = pytest.mark.engine

PAGE_SIZE, PAGES, HEADS = 4, 8, 2


@pytest.mark.parametrize("value, mode", [(None, ""), ("0", ""), ("1", "fail"), ("log", "log")])
def test_verify_mode_values(monkeypatch, value, mode):
    monkeypatch.delenv("SGLANG_PD_VERIFY", raising=False)
    if value is not None:
        monkeypatch.setenv("SGLANG_PD_VERIFY", value)
    assert verify_mode() == mode


def test_invalid_verify_mode_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_PD_VERIFY", "yes")
    with pytest.raises(ValueError, match="SGLANG_PD_VERIFY is 'yes'; expected 1, log, or 0"):
        verify_mode()


def pool(head_dim: int = 3, dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPool:
    made = MHATokenToKVPool(
        size=(PAGES - 1) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=head_dim,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.view(torch.uint8).random_(256, generator=torch.Generator().manual_seed(1))
    return made


def page_views(of: MHATokenToKVPool) -> PageViews:
    ptrs, lens, item_lens = of.get_contiguous_buf_infos()
    heads = Heads(2, 2 + HEADS, 8)
    buffers = tuple(
        Buffer(name, False, 0, size, heads, length // size)
        for name, size, length in zip("kv", item_lens, lens)
    )
    layout = RankLayout(1, 4, 0, 1, PAGE_SIZE, "bfloat16", "DRAM", 1, buffers)
    return PageViews(layout, layout.kv, [of], ptrs, lens)


WHOLE, ONE_HEAD = Part("k", False, 0, Heads(2, 4, 8)), Part("k", False, 0, Heads(3, 4, 8))
PARTS = (WHOLE, ONE_HEAD, Part("v", False, 0, Heads(2, 3, 8)))


@pytest.mark.parametrize("head_dim, dtype", [(3, torch.bfloat16), (64, torch.float32)])
@pytest.mark.parametrize("at_once", [1, 50, 1 << 20])
def test_digests_depend_on_every_byte(monkeypatch, head_dim, dtype, at_once):
    """For any width of a head, and any number of pages gathered at a time."""
    monkeypatch.setattr(page_digests, "CHUNK_BYTES", at_once)
    first = pool(head_dim, dtype)
    pages = [5, 1, 7]
    before = page_views(first).digests(PARTS, pages)
    assert before == page_views(first).digests(PARTS, pages)
    assert before.columns != page_views(first).digests(PARTS, [1, 5, 7]).columns
    last = first.k_buffer[0].view(torch.uint8)[7 * PAGE_SIZE + 3, 1]
    last[-1] ^= 1  # the last head of the page's last token
    after = page_views(first).digests(PARTS, pages)
    rows = [np.frombuffer(one.rows, np.uint64) for one in (before, after)]
    assert (rows[0] != rows[1]).tolist() == [True, True, False]
    columns = [np.frombuffer(one.columns, np.uint64) for one in (before, after)]
    assert (columns[0] != columns[1]).tolist() == [False, False, True]


def test_digest_detects_two_flipped_sign_bits():
    """Both flips change the highest bit of a word: a sum that overflows would stay the same."""
    first = pool(64, torch.float32)
    before = page_views(first).digests(PARTS, [2])
    first.k_buffer[0][2 * PAGE_SIZE, 0, :2] *= -1
    assert page_views(first).digests(PARTS, [2]).rows != before.rows


def test_page_views_do_not_copy_the_pool():
    """The buffers are views of the pool's own tensors."""
    first = pool()
    ptrs = [*map(torch.Tensor.data_ptr, (*first.k_buffer, *first.v_buffer))]
    assert [pages.data_ptr() for pages in page_views(first).pages] == ptrs


@pytest.mark.parametrize("pages", [[PAGES], [-1], [0, PAGES + 3]])
def test_pages_out_of_range_are_refused(pages):
    with pytest.raises(LayoutError, match=f"only {PAGES} exist"):
        page_views(pool()).digests(PARTS, pages)


def test_address_outside_of_all_pools_is_refused():
    held = page_views(pool())
    elsewhere = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="k, layer 0: no tensor .* contains its 64 bytes"):
        PageViews(held.layout, held.buffers[:1], [pool()], [elsewhere.data_ptr()], [64])


class StockBootstrap:
    """The part of the engine's bootstrap server that the patch set extends."""

    def __init__(self):
        self.app = web.Application()
        self._setup_routes()

    def _setup_routes(self):
        self.app.router.add_get("/health", self._health)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")


class VerifyBootstrap(verify_reports.VerifyRoutes, StockBootstrap):
    pass


def responses_to(*requests) -> list[tuple[int, str]]:
    """Status and text of each (method, path, body), from one bootstrap server."""

    async def ask():
        async with TestClient(TestServer(VerifyBootstrap().app)) as client:
            found = []
            for method, path, body in requests:
                answer = await client.request(method, path, data=body)
                found.append((answer.status, await answer.text()))
            return found

    return asyncio.run(ask())


def report(at: str, requests: int) -> bytes:
    made = verify_reports.VerifyReport("TP 0/1 PP 0/1", at, requests)
    return msgspec.json.encode(made)


def test_bootstrap_server_collects_reports(monkeypatch):
    monkeypatch.setenv("SGLANG_PD_VERIFY", "log")
    monkeypatch.setattr(verify_reports, "MAX_RANKS", 2)
    puts = [("PUT", "/verify", report(at, n)) for n, at in enumerate(["a:1", "b:2", "a:1", "c:3"])]
    *_, (status, text) = responses_to(*puts, ("GET", "/verify", None))
    answer = json.loads(text)
    assert (status, answer["mode"]) == (200, "log")
    assert [(rank["at"], rank["requests"]) for rank in answer["ranks"]] == [("a:1", 2), ("c:3", 3)]


def test_report_counts_requests_by_buffer(monkeypatch):
    monkeypatch.setattr(verify_reports, "MAX_DIFFERENCES", 2)
    made = verify_reports.VerifyReport("TP 0/1 PP 0/1", "a:1")
    made.add(["k and v"], {"k": "room 1", "v": "room 1"}, 0.1, 0.2)
    made.add(["k and w"], {"k": "room 2", "w": "room 2"}, 0.1, 0.2)
    made.add([], {}, 0.1, 0.2)
    found = {what: (one.requests, one.example) for what, one in made.differing.items()}
    assert found == {"k": (2, "room 1"), "v": (1, "room 1")}
    assert (made.requests, made.failed, made.said) == (3, 2, ["k and v", "k and w"])


@pytest.mark.parametrize("body", [b"", b"junk", b"[1]", b'{"decode": 3, "at": "x"}'])
def test_invalid_report_is_refused(monkeypatch, body):
    monkeypatch.setenv("SGLANG_PD_VERIFY", "1")
    (status, text), (_, answer) = responses_to(("PUT", "/verify", body), ("GET", "/verify", None))
    assert status == 400 and "not a report" in text
    assert json.loads(answer)["ranks"] == []


def test_no_verify_route_unless_enabled(monkeypatch):
    monkeypatch.delenv("SGLANG_PD_VERIFY", raising=False)
    found = responses_to(("GET", "/verify", None), ("GET", "/health", None))
    assert [status for status, _ in found] == [404, 200]


def test_reports_are_sent_after_a_failed_one(monkeypatch):
    """Clients name the bootstrap server, and `requests` raises more than its own exceptions."""
    tried, reports = [], verify_reports.ReportSender("TP 0/1 PP 0/1")

    def put(url: str, **_) -> None:
        tried.append(url)
        raise ValueError("no host")

    def change() -> None:
        with reports.lock:
            reports.report_for("a..b:1", "127.0.0.1:1")
            reports.mark_changed("a..b:1")

    def start(thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(verify_reports, "REPORT_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(verify_reports.requests, "put", put)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        change()
    for count in (1, 2):
        change()
        assert wait_until(lambda count=count: len(tried) == count, 5)
