"""Deferred release of an aborted request's pages until prefill has stopped writing (0.5.23)."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.utils import all_reduce_flags
from sglang.srt.environ import envs


class DeferredReleases(decode.DecodeTransferQueue):
    """The engine's queue, reduced to what it does with failed rooms."""

    def __init__(self):
        self._deferred_releases = []
        self.deferred_kv_release_timeout = (
            envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        )
        no_metrics = SimpleNamespace(enable_metrics=False)
        self.scheduler = SimpleNamespace(metrics_reporter=no_metrics)

    def defer(self, receiver, group) -> None:
        """Defers the release of the room's pages if a rank of the group aborted the room.

        Args:
            group: The TP ranks' process group; None if this rank polls alone.
        """
        has_aborted = receiver._abort_generation is not None
        if group is not None:
            (has_aborted,) = all_reduce_flags([has_aborted], group, dist.ReduceOp.MAX)
        if has_aborted:
            receiver.ensure_abort_notified(force_arm=True)
            req = SimpleNamespace(bootstrap_room=receiver.bootstrap_room)
            deferred = SimpleNamespace(kv_receiver=receiver, metadata_buffer_index=0, req=req)
            self._defer_release(deferred)

    def is_empty(self, group) -> bool:
        """Returns whether all ranks of the group have released all pages."""
        self.gloo_group = group
        alone = mock.patch.object(decode, "all_reduce_flags", lambda flags, **_: flags)
        with alone if group is None else contextlib.nullcontext():
            self.resolve_deferred_releases()
        return not self.has_pending_deferred_releases()

    def _do_release(self, decode_req, idx: int) -> None:
        receiver = decode_req.kv_receiver
        receiver.kv_mgr.clear_deferred_abort_state(receiver.bootstrap_room)
        receiver.clear()
