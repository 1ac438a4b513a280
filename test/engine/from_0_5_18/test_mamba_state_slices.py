"""Recurrent state between TP sizes: buffers of real pools, and the bytes that the engine copies.

The oracle assigns channels to ranks, and expects each channel where its rank must have it.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from engine_release import IS_0_5_18
from sglang.srt.configs.jet_nemotron import JetNemotronConfig
from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.runtime_context import get_parallel

try:
    from sglang.srt.configs.gigachat35 import GigaChat35Config
except ImportError:  # 0.5.18 has no such model
    GigaChat35Config = None

pytestmark = pytest.mark.engine

SLOTS, SLOT = 2, 1
TP_SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2)]
FLOAT32 = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)


@dataclass
class Mamba2:
    """x of 8 heads by 4 channels; B and C of `groups` groups by 3."""

    groups: int

    def shape(self, tp: int) -> Mamba2StateShape:
        return Mamba2StateShape.create(
            tp_world_size=tp,
            intermediate_size=32,
            n_groups=self.groups,
            num_heads=8,
            head_dim=4,
            state_size=3,
            conv_kernel=4,
        )

    def channels(self, rank: int, tp: int) -> list[int]:
        """The channels of x, then B, then C; a rank has the groups that its heads read."""
        held = list(range(32 // tp * rank, 32 // tp * (rank + 1)))
        heads = {channel // 4 for channel in held}
        groups = sorted({head * self.groups // 8 for head in heads})
        for first in (100, 200):
            held += [first + 3 * group + n for group in groups for n in range(3)]
        return held


class DividedModel:
    """A model whose TP ranks divide each part of its channels."""

    parts: tuple[range, ...]

    def channels(self, rank: int, tp: int) -> list[int]:
        return np.concatenate([np.split(np.array(part), tp)[rank] for part in self.parts]).tolist()


class ShortConvolution(DividedModel):
    """A short convolution, without B, C and state."""

    parts = (range(32),)

    def shape(self, tp: int) -> Mamba2StateShape:
        sizes = {"intermediate_size": 32, "n_groups": 1, "num_heads": tp, "head_dim": 32}
        return Mamba2StateShape.create(tp_world_size=tp, state_size=0, conv_kernel=4, **sizes)


class GigaChat(DividedModel):
    """q and k of 4 heads by 3 channels, v of 8 by 2."""

    parts = (range(12), range(100, 112), range(200, 216))

    def shape(self, tp: int) -> Mamba2StateShape:
        config = GigaChat35Config(
            linear_key_head_dim=3,
            linear_num_key_heads=4,
            linear_value_head_dim=2,
            linear_num_value_heads=8,
        )
        with get_parallel().override(attn_tp_size=tp):
            return config.mamba2_cache_params.shape


class JetNemotron(DividedModel):
    """q and k of 8 heads by 3 channels, without a window; v of 8 by 2."""

    parts = (range(24), range(100, 124), range(200, 216))

    def shape(self, tp: int) -> Mamba2StateShape:
        block = {"num_heads": 8, "head_dim": 3, "expand_v": 2 / 3, "conv_size": 4}
        block |= {"mode": "", "norm_eps": "0", "dconv_implementation": ""}
        block["dconv_generator_reduction"] = 1
        config = JetNemotronConfig()
        config.efficient_attention_config, config.layer_types = {"jet": block}, ["jet"]
        with get_parallel().override(attn_tp_size=tp):
            return config.mamba2_cache_params.shape


MODELS = {
    "eight groups": Mamba2(8),
    "four groups": Mamba2(4),
    "one group": Mamba2(1),
    "short": ShortConvolution(),
    "jet": JetNemotron(),
    **({"gigachat": GigaChat()} if GigaChat35Config else {}),
}


def pool_of(model, tp: int) -> MambaPool:
    params = Mamba2CacheParams(shape=model.shape(tp), layers=[2, 5], dtype=FLOAT32)
    return MambaPool(
        size=SLOTS, spec_state_size=0, cache_params=params, mamba_layer_ids=[2, 5], device="cpu"
    )


def expected(model, rank: int, tp: int, pool: MambaPool) -> dict[str, torch.Tensor]:
    """A rank's expected slot: conv [layers, channels, window], and the heads of its state."""
    held = torch.tensor(model.channels(rank, tp), dtype=torch.float32)
    window = pool.mamba_cache.conv[0].shape[-1]
    conv = held[None, :, None] * 10 + torch.arange(window) + torch.tensor([0, 5000])[:, None, None]
    state = pool.mamba_cache.temporal[:, SLOT]
    heads = torch.arange(state.shape[1], dtype=torch.float32) + rank * state.shape[1]
    numbers = torch.arange(state[0, 0].numel(), dtype=torch.float32).view(state.shape[2:])
    temporal = (
        heads[None, :, None, None] * 100 + numbers + torch.tensor([1, 9001])[:, None, None, None]
    )
    return {"conv": conv, "temporal": temporal}


def entries(pool: MambaPool) -> list[dict]:
    """Each transferred buffer: its tensor [slots, ...], and what the engine reports about it."""
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    tensors = [pool.mamba_cache.conv[0], pool.mamba_cache.temporal]
    # 0.5.18 lists empty tensors, too.
    layers = [layer for tensor in tensors if IS_0_5_18 or tensor.numel() for layer in tensor]
    assert [layer.data_ptr() for layer in layers] == pointers
    facts = zip(
        layers,
        items,
        pool.get_state_dim_per_tensor(),
        pool.get_state_slice_outer_counts(),
        pool.get_state_conv_shard_groups(),
    )
    names = ("layer", "bytes", "dim", "outer", "parts")
    return [dict(zip(names, fact)) for fact in facts]


def send(sender: MambaPool, receiver: MambaPool, ours: tuple[int, int], theirs: tuple[int, int]):
    for src, dst in zip(entries(sender), entries(receiver)):
        blocks = compute_mamba_state_slice_byte_blocks(
            src_item_len=src["bytes"],
            dst_item_len=dst["bytes"],
            src_dim=src["dim"],
            dst_dim=dst["dim"],
            outer_count=src["outer"],
            src_attn_tp_size=ours[1],
            dst_attn_tp_size=theirs[1],
            dst_tp_rank_in_group=theirs[0],
            local_tp_rank_in_group=ours[0],
            conv_shard_groups=src["parts"],
        )
        out_of, into = (side["layer"][SLOT].reshape(-1).view(torch.uint8) for side in (src, dst))
        assert into.data_ptr() == dst["layer"][SLOT].data_ptr()
        for start, to, length in blocks:
            assert length > 0 or not src["bytes"]
            assert start + length <= len(out_of) and to + length <= len(into)
            into[to : to + length] = out_of[start : start + length]


@pytest.mark.parametrize("prefill, decode", TP_SIZES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_channel_arrives_at_its_tp_rank(model, prefill, decode):
    senders = {}
    for rank in range(prefill):
        pool = senders[rank] = pool_of(model, prefill)
        holds = expected(model, rank, prefill, pool)
        pool.mamba_cache.conv[0][:, SLOT] = holds["conv"]
        pool.mamba_cache.temporal[:, SLOT] = holds["temporal"]
    for rank in range(decode):
        receiver = pool_of(model, decode)
        for sender, pool in senders.items():
            if sender * decode // prefill == rank or rank * prefill // decode == sender:
                send(pool, receiver, (sender, prefill), (rank, decode))
        holds = expected(model, rank, decode, receiver)
        assert torch.equal(receiver.mamba_cache.conv[0][:, SLOT], holds["conv"])
        assert torch.equal(receiver.mamba_cache.temporal[:, SLOT], holds["temporal"])
        assert not receiver.mamba_cache.conv[0][:, SLOT + 1 :].any()
