"""The CPU host's stand-ins for chains of drafted tokens, and for attention over them."""

import os
from types import SimpleNamespace

import pytest

from pd_harness.cpu_host import SWITCH
from pd_harness.releases import release

if os.environ.get(SWITCH) != "1":
    pytest.skip("needs the engine on the CPU host: scripts/test.sh", allow_module_level=True)

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.draft_utils import DraftBackendFactory

HEADS, WIDTH = 2, 8
TOKENS = 4  # tokens of a request that are verified at once
LENGTHS = (5, 9)  # tokens of each request before them
SLOTS = 64
RETRIEVE = "retrive" if release() == "0.5.9" else "retrieve"  # the engine's spelling


def build_tree(topk: int = 1):
    """Returns the engine's tree of two requests' last tokens, 7 and 8, and three drafts of each."""
    return eagle_utils.build_tree_kernel_efficient(
        torch.tensor([7, 8]),
        torch.empty(2, 0),
        torch.arange(3).repeat(2, 1),
        torch.tensor([[10, 11, 12], [20, 21, 22]]),
        torch.tensor(LENGTHS),
        sum(LENGTHS),
        topk,
        3,
        TOKENS,
    )


def test_draft_chain_is_built():
    _, positions, places, next_tokens, siblings, tokens = build_tree()
    assert tokens.tolist() == [7, 10, 11, 12, 8, 20, 21, 22]
    assert positions.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert places.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next_tokens.tolist() == [[1, 2, 3, -1]] * 2
    assert siblings.tolist() == [[-1] * TOKENS] * 2


def test_topk_above_one_is_refused():
    with pytest.raises(ValueError, match="not topk 2"):
        build_tree(topk=2)


@pytest.mark.parametrize(
    ("says", "accepted", "kept"),
    [
        ([10, 11, 12, 13], 3, [10, 11, 12, 13]),  # all drafts, and the target's next token
        ([10, 11, 99, 13], 2, [10, 11, 99]),
        ([99, 11, 12, 13], 0, [99]),  # right drafts behind a wrong one are rejected
    ],
)
def test_verify_accepts_matching_prefix(says, accepted, kept):
    _, _, places, next_tokens, siblings, tokens = build_tree()
    predicts, index, number = eagle_utils.verify_tree_greedy_func(
        predicts=torch.zeros(9, dtype=torch.int32),
        accept_index=torch.full((2, TOKENS), -1, dtype=torch.int32),
        accept_token_num=torch.zeros(2, dtype=torch.int32),
        candidates=tokens.view(2, TOKENS),
        **{
            f"{RETRIEVE}_index": places,
            f"{RETRIEVE}_next_token": next_tokens,
            f"{RETRIEVE}_next_sibling": siblings,
        },
        target_predict=torch.tensor([says, [20, 99, 99, 99]]),
        topk=1,
    )
    assert number.tolist() == [accepted, 1]
    assert index[0].tolist() == [*range(accepted + 1), *[-1] * (3 - accepted)]
    assert predicts[index[0][: accepted + 1]].tolist() == kept
    assert (index[1].tolist(), predicts[index[1][:2]].tolist()) == ([4, 5, -1, -1], [20, 99])


class Batch:
    """Two requests in a pool of random K and V, which attention reads and writes."""

    def __init__(self):
        self.pool = MHATokenToKVPool(SLOTS, 1, torch.float32, HEADS, WIDTH, 1, "cpu", False)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_()
        self.rows = torch.randperm(SLOTS).view(2, SLOTS // 2)
        self.table = SimpleNamespace(req_to_token=self.rows)
        self.layer = RadixAttention(HEADS, WIDTH, WIDTH**-0.5, HEADS, layer_id=0)

    def slots(self, starts, ends) -> torch.Tensor:
        return torch.cat([row[a:b] for row, a, b in zip(self.rows, starts, ends, strict=True)])

    def attend(self, attention, mode, q, slots, **more) -> torch.Tensor:
        batch = SimpleNamespace(
            forward_mode=mode,
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.table,
            req_pool_indices=torch.arange(2),
            out_cache_loc=slots,
            encoder_lens=None,
            **more,
        )
        k, v = (buffer[slots].clone() for buffer in (self.pool.k_buffer[0], self.pool.v_buffer[0]))
        return attention.forward(q.flatten(1), k, v, self.layer, batch).view_as(q)

    def expected(self, q, starts, ends) -> torch.Tensor:
        """Returns the attention of each new token over its request up to that token."""
        rows = [
            (row, length)
            for row, a, b in zip(self.rows, starts, ends, strict=True)
            for length in range(a + 1, b + 1)
        ]
        out = []
        for one, (row, length) in zip(q, rows, strict=True):
            k, v = (b[0][row[:length]] for b in (self.pool.k_buffer, self.pool.v_buffer))
            weights = (torch.einsum("hw,thw->ht", one, k) * WIDTH**-0.5).softmax(-1)
            out.append(torch.einsum("ht,thw->hw", weights, v))
        return torch.stack(out)


def attention(batch: Batch) -> TorchNativeAttnBackend:
    """Returns a backend; after 0.5.9 it gets the pools here, in 0.5.9 with each batch."""
    pools = {"token_to_kv_pool": batch.pool, "req_to_token_pool": batch.table}
    return TorchNativeAttnBackend(SimpleNamespace(device="cpu", **pools))


def test_target_verify_attends_to_prefix_and_drafted_tokens():
    batch, ends = Batch(), [length + TOKENS for length in LENGTHS]
    q = torch.randn(2 * TOKENS, HEADS, WIDTH)
    got = batch.attend(
        attention(batch),
        ForwardMode.TARGET_VERIFY,
        q,
        batch.slots(LENGTHS, ends),
        seq_lens=torch.tensor(LENGTHS),
        extend_prefix_lens=None,
        extend_seq_lens=None,
        spec_info=SimpleNamespace(draft_token_num=TOKENS),
    )
    torch.testing.assert_close(got, batch.expected(q, LENGTHS, ends))


def test_draft_extend_attends_to_accepted_tokens():
    """The batch also has stale prefix lengths of an earlier batch, which must not be used."""
    batch, accepted = Batch(), (1, 3)
    starts = [length - new for length, new in zip(LENGTHS, accepted, strict=True)]
    q = torch.randn(sum(accepted), HEADS, WIDTH)
    got = batch.attend(
        attention(batch),
        ForwardMode.DRAFT_EXTEND if release() == "0.5.9" else ForwardMode.DRAFT_EXTEND_V2,
        q,
        batch.slots(starts, LENGTHS),
        seq_lens=torch.tensor(LENGTHS),
        extend_prefix_lens=torch.tensor([0]),
        extend_seq_lens=torch.tensor(accepted),
    )
    torch.testing.assert_close(got, batch.expected(q, starts, LENGTHS))


def test_draft_decode_steps_attend_to_previous_steps():
    batch, q = Batch(), torch.randn(2, HEADS, WIDTH)
    own = attention(batch)
    runner = SimpleNamespace(attn_backend=own, draft_attention_backend=None)
    arguments = [SimpleNamespace(speculative_draft_attention_backend=None)]
    factory = DraftBackendFactory(*(arguments if release() == "0.5.9" else []), runner, 1, 3)
    steps = factory.create_decode_backend()
    assert len(steps.attn_backends) == 2
    for number, step in enumerate(steps.attn_backends):
        starts = [length + number for length in LENGTHS]
        ends = [length + 1 for length in starts]
        got = batch.attend(
            step,
            ForwardMode.DECODE,
            q,
            batch.slots(starts, ends),
            seq_lens=torch.tensor(LENGTHS),
        )
        torch.testing.assert_close(got, batch.expected(q, starts, ends))
    assert factory.create_draft_extend_backend() is own
