"""Verifies KV of servers that elide index keys, which depends on each server's options."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.kv_layout import Buffer, RankLayout
from sglang.srt.disaggregation.pd.page_digests import PageViews
from sglang.srt.disaggregation.pd.verify import Verifier
from sglang.srt.disaggregation.pd.verify_reports import VerifyReport

pytestmark = pytest.mark.engine

PAGES, LAYERS, ELIDED = 8, 4, (1, 3)
OWN, THEIRS = [1, 2, 3], [4, 5, 6]


class Pool:
    __module__ = "sglang.pools"  # `PageViews` searches the engine's classes for tensors


def make_verifier(elides: bool, at: list[int]) -> Verifier:
    """The verifier of a rank whose pages `at` hold the request's data."""

    def tensors(width: int, elided=()) -> list[torch.Tensor]:
        made = []
        for layer in range(LAYERS):
            rows = torch.zeros((0 if layer in elided else PAGES, width), dtype=torch.uint8)
            if len(rows):
                numbers = torch.arange(len(at) * width) + layer
                rows[at] = numbers.reshape(len(at), width).to(torch.uint8)
            made.append(rows)
        return made

    pool = Pool()
    pool.kv, pool.keys = tensors(256), tensors(64, ELIDED if elides else ())
    kv, state = (
        tuple(
            Buffer(name, False, n, one.shape[1] if len(one) else 0, None, len(one))
            for n, one in enumerate(held)
        )
        for name, held in (("kv", pool.kv), ("index_k", pool.keys))
    )
    layout = RankLayout(0, 1, 0, 1, 4, "bfloat16", "DRAM", LAYERS, kv, state, (64,) * 10, 16, True)
    memories = [
        PageViews(layout, buffers, [pool], [t.data_ptr() for t in held], [t.nbytes for t in held])
        for buffers, held in ((layout.kv, pool.kv), (layout.state, pool.keys))
    ]
    made = Verifier(SimpleNamespace(layout=layout, system_dp_rank=None), *memories, "fail")
    made.pool = pool
    return made


def transfer_difference(prefill: Verifier, decode: Verifier) -> str | None:
    chunks = [(slice(0, 3), np.array(OWN))]
    sent = prefill.digests(7, chunks, decode.layout, OWN, True)
    return decode.compare(
        7, [sent], np.array(THEIRS), THEIRS, VerifyReport("prefill", "decode"), 0.1
    )


CASES = pytest.mark.parametrize(
    "prefill, decode",
    [(False, False), (True, True), (False, True), (True, False)],
    ids=["neither elides", "both elide", "decode elides", "prefill elides"],
)


@CASES
def test_equal_pages_pass(prefill, decode):
    assert transfer_difference(make_verifier(prefill, OWN), make_verifier(decode, THEIRS)) is None


@CASES
def test_differing_page_is_detected(prefill, decode):
    receiver = make_verifier(decode, THEIRS)
    receiver.pool.keys[2][5, 7] ^= 1
    assert "index_k, layer 2" in transfer_difference(make_verifier(prefill, OWN), receiver)
