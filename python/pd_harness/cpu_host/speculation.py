"""Speculative decoding without an accelerator's kernels, for drafts without branches.

With ``--speculative-eagle-topk 1`` the draft model proposes one token after another.  The engine's
tree is then a chain: the request's last token, then the drafted tokens.
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
    """Arrange the tokens to verify, in place of ``sgl_kernel.build_tree_kernel_efficient``.

    Fills ``positions`` [requests * tokens], ``places`` [requests, tokens], the tokens' places in
    the batch, and ``next_tokens`` [requests, tokens], each token's successor in its chain; the
    last one's stays -1.  The mask stays all true: attention here is causal, and so is a chain.

    Raises:
        ValueError: there are branches.
    """
    if topk != 1:
        raise ValueError(f"the CPU host supports only topk 1, not topk {topk}")
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
    """Accept drafted tokens up to the first that differs from the target's, without a kernel.

    Shapes: ``candidates``, ``target_predict`` and ``retrive_index`` are [requests, tokens]: the
    drafted tokens, the target's next tokens, and the tokens' places in the batch.  Fills and
    returns ``predicts`` [places], ``accept_index`` [requests, tokens], places or -1, and
    ``accept_token_num`` [requests], the number of drafted tokens accepted.
    """
    agreed = candidates[:, 1:] == target_predict[:, :-1]
    accept_token_num.copy_(agreed.cumprod(dim=1).sum(dim=1))
    accepted = torch.arange(candidates.shape[1]) <= accept_token_num[:, None]
    accept_index.copy_(torch.where(accepted, retrive_index, -1))
    predicts[retrive_index.flatten()] = target_predict.flatten().to(predicts.dtype)
    return predicts, accept_index, accept_token_num


class DraftSteps:
    """Attention backends of a draft model, one for each of its ``steps`` but the first.

    The draft model has computed the first token before these steps.
    """

    def __init__(self, attention, steps: int):
        self.attn_backends = [copy.copy(attention) for _ in range(steps - 1)]
        for drafted, one in enumerate(self.attn_backends, start=1):
            one.drafted = drafted

    def init_forward_metadata(self, forward_batch) -> None:
        """Do nothing: these backends have no metadata."""


def with_decode_lengths(forward_batch, drafted: int):
    """The batch with ``drafted`` tokens added to each request's length."""
    if not drafted:
        return forward_batch
    batch = copy.copy(forward_batch)
    batch.seq_lens = forward_batch.seq_lens + drafted
    return batch


def is_draft_extend(mode) -> bool:
    """Whether the draft model extends by accepted tokens; later releases have the v2 mode alone."""
    return mode.is_draft_extend() if hasattr(mode, "is_draft_extend") else mode.is_draft_extend_v2()


def with_extend_lengths(forward_batch):
    """The batch with the lengths that attention over a prompt's chunk reads.

    When the target verifies, the batch's lengths exclude the tokens to verify; when the draft
    model extends, the batch's prefix lengths are an earlier batch's.
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
