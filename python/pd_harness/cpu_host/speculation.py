"""Speculative decoding without an accelerator's kernels, where a draft has no branches.

With ``--speculative-eagle-topk 1`` the draft proposes one token after another.  The engine's tree
is then a chain: the request's last token, and after it what was drafted.
"""

import copy

import torch


def build_chains(
    parents,
    chosen,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    next_tokens: torch.Tensor,
    siblings: torch.Tensor,
    topk: int,
    steps: int,
    tokens: int,
    mask_mode: int,
) -> None:
    """Say where the tokens to verify stand, as ``sgl_kernel.build_tree_kernel_efficient`` does.

    It fills ``positions`` [requests * tokens], ``places`` [requests, tokens], which are those of
    the tokens in the batch, and ``next_tokens`` [requests, tokens], in their chain, of which the
    last stays -1.  The mask stays all true: attention here is causal, and so is a chain.

    Raises:
        ValueError: there are branches.
    """
    if topk != 1:
        raise ValueError(f"the CPU host drafts one token at a time, topk is {topk}")
    steps_on = torch.arange(tokens)
    positions.copy_((seq_lens[:, None] + steps_on).flatten())
    places.copy_(torch.arange(places.numel()).view_as(places))
    next_tokens[:, :-1] = steps_on[1:]


def verify_chains(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept drafted tokens up to the first that is not the target's, in place of a kernel.

    Shapes: ``candidates``, ``target_predict`` and ``retrive_index`` are [requests, tokens]: what
    was drafted, what the target says comes next, and the tokens' places in the batch.  It fills
    and returns ``predicts`` [places], ``accept_index`` [requests, tokens], places or -1, and
    ``accept_token_num`` [requests], the drafted ones among them.
    """
    agreed = candidates[:, 1:] == target_predict[:, :-1]
    accept_token_num.copy_(agreed.cumprod(dim=1).sum(dim=1))
    accepted = torch.arange(candidates.shape[1]) <= accept_token_num[:, None]
    accept_index.copy_(torch.where(accepted, retrive_index, -1))
    predicts[retrive_index.flatten()] = target_predict.flatten().to(predicts.dtype)
    return predicts, accept_index, accept_token_num


class DraftSteps:
    """Attention of a draft that takes so many ``steps``: a backend for each that computes.

    The first token comes from what the draft computed before.
    """

    def __init__(self, attention, steps: int):
        self.attn_backends = [copy.copy(attention) for _ in range(steps - 1)]
        for drafted, one in enumerate(self.attn_backends, start=1):
            one.drafted = drafted

    def init_forward_metadata(self, forward_batch) -> None:
        """There are none."""


def with_decode_lengths(forward_batch, drafted: int):
    """The batch with the lengths of its requests where the last so many tokens are drafts."""
    if not drafted:
        return forward_batch
    batch = copy.copy(forward_batch)
    batch.seq_lens = forward_batch.seq_lens + drafted
    return batch


def is_draft_extend(mode) -> bool:
    """Whether the draft takes in what was accepted; later releases have the second kind alone."""
    return mode.is_draft_extend() if hasattr(mode, "is_draft_extend") else mode.is_draft_extend_v2()


def with_extend_lengths(forward_batch):
    """The batch with the lengths that attention over a prompt's chunk reads.

    While the target verifies, they are those before the tokens to verify; when the draft takes in
    what was accepted, lengths before are of an earlier batch.
    """
    mode, batch = forward_batch.forward_mode, copy.copy(forward_batch)
    if mode.is_target_verify():
        batch.extend_prefix_lens = forward_batch.seq_lens
        batch.extend_seq_lens = torch.full_like(
            forward_batch.seq_lens, forward_batch.spec_info.draft_token_num
        )
        batch.seq_lens = batch.extend_prefix_lens + batch.extend_seq_lens
    elif is_draft_extend(mode):
        batch.extend_prefix_lens = forward_batch.seq_lens - forward_batch.extend_seq_lens
    return batch
