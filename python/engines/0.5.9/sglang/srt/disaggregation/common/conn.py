"""Base classes that every transfer backend shares, placed before the engine's own; see `pd`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.interleaving import Interleaver
from sglang.srt.disaggregation.pd.layer_pointers import LayerPointers
from sglang.srt.disaggregation.pd.noted_transfers import NotedTransfers
from sglang.srt.disaggregation.pd.peer_silence import SilenceWatch
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.peers import PeerTable
from sglang.srt.disaggregation.pd.prefill_servers import BootstrapServer, PrefillServers
from sglang.srt.disaggregation.pd.receiver import Receiver
from sglang.srt.disaggregation.pd.room_failures import RoomTable
from sglang.srt.disaggregation.pd.sender import Sender
from sglang.srt.disaggregation.pd.verify_exchange import VerifyingManager

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import (
        BaseKVBootstrapServer,
        BaseKVManager,
        BaseKVReceiver,
        BaseKVSender,
    )


class CommonKVManager(
    NotedTransfers,
    RoomTable,
    PeerTable,
    SilenceWatch,
    PrefillServers,
    LayerPointers,
    VerifyingManager,
    BaseKVManager,
):
    REMOVED = ("get_mha_kv_ptrs_with_pp", "get_mla_kv_ptrs_with_pp")

    @functools.cached_property
    def interleaver(self) -> Interleaver:
        """Interleaves what this decode rank receives."""
        return Interleaver(self.kv_args)

    def _connect(self, endpoint: str, is_ipv6: bool = False) -> PeerSocket:
        return PeerSocket(endpoint, is_ipv6)


class CommonKVSender(Sender, BaseKVSender):
    REMOVED = ("__init__",)


class CommonKVReceiver(Receiver, BaseKVReceiver):
    REMOVED = (
        "__init__",
        "_get_bootstrap_info_from_server",
        "_get_prefill_parallel_info_from_server",
    )


class CommonKVBootstrapServer(BootstrapServer, BaseKVBootstrapServer):
    REMOVED = ("_handle_route_get",)
