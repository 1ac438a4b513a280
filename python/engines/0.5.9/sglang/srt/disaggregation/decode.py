"""Decode: makes the queue's KV manager, and allocates only what whole pages allow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from sglang.srt.disaggregation.base import BaseKVManager
from sglang.srt.disaggregation.pd.local_layout import make_kv_manager
from sglang.srt.disaggregation.pd.noted_requests import (
    QueuedRequests,
    note_request,
    note_seconds,
)
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.utils import (
    DisaggregationMode,
    KVClassType,
    get_kv_class,
)
from sglang.srt.layers.dp_attention import get_attention_tp_size

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import (
        DecodeRequest,
        EngineDecodePreallocQueue,
        EngineDecodeTransferQueue,
        Req,
    )

RENAMED = (
    ("DecodePreallocQueue", "EngineDecodePreallocQueue"),
    ("DecodeTransferQueue", "EngineDecodeTransferQueue"),
)


class DecodePreallocQueue(EngineDecodePreallocQueue):
    # Tokens of the last request's pages beyond what the engine subtracted for it.
    uncounted_tokens = 0

    def _init_kv_manager(self) -> BaseKVManager:
        """Registers this rank's pools with the transfer backend and starts its KV manager."""
        kv_args = get_kv_class(self.transfer_backend, KVClassType.KVARGS)()
        kv_args.decode_tp_size = get_attention_tp_size()
        kv_args.engine_rank = self.tp_rank % kv_args.decode_tp_size
        kv_args.prefill_pp_size = self.prefill_pp_size
        return make_kv_manager(self, kv_args, DisaggregationMode.DECODE)

    def _reserved_and_uncounted_tokens(self) -> int:
        """Returns the tokens to reserve for a request, plus those that the last one took uncounted.

        The engine counts requests' tokens, not their pages, when it allocates several at a time: it
        would take more than is left, and its assertion would end the server. It adds this to the
        tokens of the next one, once.
        """
        return self.reserved_tokens + self.uncounted_tokens

    def _set_reserved_tokens(self, tokens: int) -> None:
        self.reserved_tokens = tokens

    # The engine's attribute.
    num_reserved_decode_tokens = property(_reserved_and_uncounted_tokens, _set_reserved_tokens)

    def _allocatable_tokens(self, *given, **options) -> int:
        """Returns how many tokens are left. Extends the engine's: all are counted again."""
        self.uncounted_tokens = 0
        return super()._allocatable_tokens(*given, **options)

    def _pre_alloc(self, req: Req) -> torch.Tensor:
        """Allocates a request's pages. Extends the engine's: notes what it does not count."""
        free = self.token_to_kv_pool_allocator.available_size
        before = free()
        locations = super()._pre_alloc(req)
        counted = len(req.origin_input_ids) + len(req.output_ids) + self.reserved_tokens
        self.uncounted_tokens = max(0, before - free() - counted)
        return locations

    def add(self, req: Req, *more, **options) -> None:
        """Queues a request. Extends the engine's: notes it, unless it is refused."""
        super().add(req, *more, **options)
        if self.queue and self.queue[-1].req is req:
            note_request(self.kv_manager, req, f"{req.bootstrap_host}:{req.bootstrap_port}")

    def pop_preallocated(
        self, *given, **options
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Returns requests that were requested from prefill. Extends the engine's: see below."""
        start = time.monotonic()
        found = super().pop_preallocated(*given, **options)
        note_seconds(self.kv_manager, "prealloc", start)
        return found


class DecodeTransferQueue(EngineDecodeTransferQueue):
    queued: QueuedRequests = PerInstance(QueuedRequests)

    def pop_transferred(self, *given, **options) -> list[Req]:
        """Returns requests whose KV has arrived. Extends the engine's: notes if that takes long."""
        start, before = time.monotonic(), list(self.queue)
        done = super().pop_transferred(*given, **options)
        manager = self.scheduler.disagg_decode_prealloc_queue.kv_manager
        note_seconds(manager, "transfer", start)
        self.queued.note(manager, before, self.queue, done, self.scheduler.waiting_queue)
        return done
