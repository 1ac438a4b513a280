"""Decode with HiCache: a prefix that cannot be restored fails its request on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode_hicache_mixin import (
        DecodeRequest,
        EngineDecodeHiCacheTransferMixin,
        HiCacheRestoreResult,
    )

RENAMED = (("DecodeHiCacheTransferMixin", "EngineDecodeHiCacheTransferMixin"),)


class DecodeHiCacheTransferMixin(EngineDecodeHiCacheTransferMixin):
    def _process_hicache_local_restores(self, decode_reqs: list[DecodeRequest]) -> None:
        """Restores prefixes. Extends the engine's: aborts the request of one that fails.

        The engine would free its pages at once, to which prefill may still write.
        """
        super()._process_hicache_local_restores(decode_reqs)
        for request in decode_reqs:
            if request.hicache_restore_status == HiCacheRestoreResult.FAILED:
                request.hicache_restore_status = HiCacheRestoreResult.READY  # no other attempt
                receiver = request.kv_receiver
                receiver.abort()
                if hasattr(receiver, "kv_mgr"):  # a fake one has none
                    reason = "decode could not restore the cached prefix from HiCache"
                    receiver.kv_mgr.record_failure(receiver.bootstrap_room, reason)
