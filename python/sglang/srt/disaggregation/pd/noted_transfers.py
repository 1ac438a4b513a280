"""A KV manager's `transfer_log`: what it notes, and the meter in front of its transfer engine."""

from __future__ import annotations

from collections import Counter
from typing import Dict

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.pd.per_instance import PerInstance
from sglang.srt.disaggregation.pd.server_names import resolved_name
from sglang.srt.disaggregation.pd.transfer_meter import MeteredAgent, MeteredEngine, Sending
from sglang.srt.disaggregation.transfer_log import TransferLog
from sglang.srt.disaggregation.utils import DisaggregationMode

KINDS = ("patched", "stock", "refused", "silent")  # how a server serves another one, best first
# Bootstrap addresses whose servers' names are remembered; a client may make up many.
MAX_ADDRESSES = 1 << 12


class NotedTransfers:
    """Base of a KV manager, before the engine's.

    On prefill, `decode_kv_args_table` has each decode rank's registration by name, `transfer_infos`
    those that have requested each room, and `silent_peers` why nothing is sent to some.
    `failure_records` has why rooms failed. On decode, a release provides `prefill_kinds()`.
    """

    transfer_log: TransferLog = PerInstance(TransferLog)
    now_sending: Sending = PerInstance(Sending)
    # Decode: names of the prefill servers that have answered, by bootstrap address.
    prefill_names: Dict[str, str] = PerInstance(dict)
    # `ascend` for the manager derived from Mooncake's.
    backend_name = "mooncake"

    def start_transfer_log(self) -> None:
        """Starts the log, and meters the transfer engine; call it before this rank's threads.

        Raises:
            OSError: `SGLANG_PD_REQUEST_LOG` names a folder that cannot be written.
        """
        shows_metrics = getattr(getattr(self, "server_args", None), "enable_metrics", True)
        # Buffers are registered again after a pause.
        if self.transfer_log.is_on or not TransferLog.is_wanted(shows_metrics):
            return
        is_prefill = self.disaggregation_mode == DisaggregationMode.PREFILL
        is_first_rank = not (self.attn_tp_rank or self.pp_rank or getattr(self, "attn_cp_rank", 0))
        self.transfer_log.start(
            "prefill" if is_prefill else "decode",
            self._rank_label(),
            self.backend_name,
            is_first_rank,
            self.decode_kinds if is_prefill else self.prefill_kinds,
            shows_metrics,
        )
        meter = (self.transfer_log, self.now_sending, self.server_of)
        if hasattr(self, "agent"):
            self.agent = MeteredAgent(self.agent, *meter)
        else:
            self.engine = MeteredEngine(self.engine, *meter)

    def _rank_label(self) -> str:
        dp = getattr(self.kv_args, "system_dp_rank", None)
        ranks = f"TP {self.attn_tp_rank}/{self.attn_tp_size} PP {self.pp_rank}/{self.pp_size}"
        return ranks if dp is None else f"DP {dp} {ranks}"

    def note_status(self, room: int, status: KVPoll) -> None:
        """Notes a status that an open room has got."""
        log = self.transfer_log
        if not log.is_on:
            return
        if status == KVPoll.Failed:
            log.failed(room, self.failure_records.get(room, ""))
        elif self.disaggregation_mode == DisaggregationMode.PREFILL:
            if status == KVPoll.Success:
                log.ended(room)
            elif status != KVPoll.Bootstrapping:
                peer = next(iter(list(self.transfer_infos.get(room, ()))), "")
                log.requested(room, self.server_of(peer))

    def server_of(self, peer: str) -> str:
        """Returns the name of a decode rank's server; empty if the rank is not registered."""
        return getattr(self.decode_kv_args_table.get(peer), "server", "")

    def decode_kinds(self) -> Dict[str, int]:
        """Returns how many decode servers are `patched`, `stock`, `refused` and `silent`.

        A server's best rank counts: silent ranks may be those of a process that was replaced.
        """
        kinds: Dict[str, str] = {}
        for name, info in list(self.decode_kv_args_table.items()):
            kind = "patched" if info.layout_frame else "stock"
            if name in self.silent_peers or getattr(info, "needs_retry", False):
                kind = "silent"  # or NIXL has released it after a long silence
            elif info.refusal:
                kind = "refused"
            kinds[info.server] = min(kind, kinds.get(info.server, kind), key=KINDS.index)
        return count_kinds(kinds)

    def note_prefill(self, address: str) -> None:
        """Notes that the prefill server at a bootstrap address has answered; may wait for DNS."""
        if self.transfer_log.is_on:
            if len(self.prefill_names) >= MAX_ADDRESSES:
                self.prefill_names.clear()
            self.prefill_names[address] = resolved_name(address)

    def note_requested(self, room: int, address: str) -> None:
        """Notes that decode requests a room of the prefill server at a bootstrap address."""
        self.transfer_log.requested(room, self.prefill_names.get(address, ""))

    def note_verified(self, address: str, differs: bool) -> None:
        """Notes that the KV of a request to the prefill server at this address was compared."""
        self.transfer_log.verified(self.prefill_names.get(address, ""), differs)

    def count_prefills(self, kinds: Dict[str, str]) -> Dict[str, int]:
        """Returns how many prefill servers there are of each kind; one may have many addresses.

        Args:
            kinds: By bootstrap address.
        """
        return count_kinds({self.prefill_names.get(one) or one: kinds[one] for one in kinds})


def count_kinds(kinds: Dict[str, str]) -> Dict[str, int]:
    """Returns how many servers there are of each kind.

    Args:
        kinds: By the servers' names.
    """
    found = Counter(kinds.values())
    return {kind: found[kind] for kind in KINDS}
