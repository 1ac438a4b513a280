"""Attention of the CPU host's servers, in which a prompt's chunk costs only its own tokens.

With each chunk the engine's torch-native backend computes all tokens of the prompt so far, and
keeps the new ones; a prompt of 1,500 tokens in chunks of 128 then takes twelve times as long.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def extend(
    self,
    query,
    output,
    k_cache,
    v_cache,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_prefix_lens,
    extend_seq_lens,
    encoder_lens=None,
    scaling=None,
    enable_gqa=False,
    causal=False,
    is_cross_attn=False,
    sliding_window_size=None,
):
    """Attention of new tokens over all tokens of their requests; a method of that backend.

    ``query`` and ``output`` are [new tokens of all requests, heads, width], caches [tokens, KV
    heads, width]. The other tensors give each request's row in ``req_to_token``, and its numbers
    of all, previous and new tokens. With a window a token sees itself and
    ``sliding_window_size`` tokens before it.

    Raises:
        NotImplementedError: attention to an encoder's tokens.
    """
    if is_cross_attn:
        raise NotImplementedError("the CPU host does not support attention to an encoder's tokens")
    requests = (req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens)
    first = 0
    for row, length, before, new in zip(*(each.tolist() for each in requests)):
        tokens = req_to_token[row, :length]
        seen = torch.ones(new, length, dtype=torch.bool).tril(before) if causal else None
        if sliding_window_size is not None:
            seen = seen.triu(before - sliding_window_size)
        output[first : first + new] = scaled_dot_product_attention(
            _heads_first(query[first : first + new]),
            _heads_first(k_cache[tokens].to(query.dtype)),
            _heads_first(v_cache[tokens].to(query.dtype)),
            attn_mask=seen,
            enable_gqa=enable_gqa,
            scale=scaling,
        )[0].movedim(0, 1)
        first += new
    return output


def _heads_first(tokens: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, width] as a batch of one, [1, heads, tokens, width]."""
    return tokens.movedim(0, 1)[None]
