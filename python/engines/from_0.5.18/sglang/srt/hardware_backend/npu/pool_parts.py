"""What NPU pools of several releases have in common: layers as tokens, and moves between slots."""

from typing import Any, Iterable, List, NoReturn, Tuple

import torch


def mha_layers(pool: Any) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Returns K and V of each layer of an MHA pool as [tokens, heads, width]."""
    return [
        (k.view(-1, pool.head_num, pool.head_dim), v.view(-1, pool.head_num, pool.v_head_dim))
        for k, v in zip(pool.k_buffer, pool.v_buffer)
    ]


def move_tokens(
    layers: Iterable[Iterable[torch.Tensor]], target: torch.Tensor, source: torch.Tensor
) -> None:
    """Copies tokens to other slots of each layer's parts, of shape [tokens, ...]."""
    target, source = target.view(-1).long(), source.view(-1).long()
    for layer in layers:
        for rows in layer:
            rows[target] = rows[source]


def raise_missing_kv_buffer() -> NoReturn:
    """Raises AttributeError: CUDA's MLA pools have a buffer that those of an NPU lack."""
    raise AttributeError(
        "NPU MLA pools have no kv_buffer: latents are in k_buffer, RoPE parts in v_buffer, "
        "page by page. The code that reads it does not support NPUs; choose an attention "
        "backend or cache that does, such as --attention-backend ascend"
    )
