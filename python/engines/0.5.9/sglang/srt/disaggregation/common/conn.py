"""What every transfer backend shares, put before the engine's own bases; see `pd`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.pd.pairs import LayerPairs
from sglang.srt.disaggregation.pd.peer_sockets import PeerSocket
from sglang.srt.disaggregation.pd.prefill_servers import BootstrapServer, PrefillServers
from sglang.srt.disaggregation.pd.receiver import Receiver
from sglang.srt.disaggregation.pd.registration import Registrations
from sglang.srt.disaggregation.pd.rooms import Rooms
from sglang.srt.disaggregation.pd.sender import Sender
from sglang.srt.disaggregation.pd.silence import NoticesSilence
from sglang.srt.disaggregation.pd.verify import Verifies

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import (
        BaseKVBootstrapServer,
        BaseKVManager,
        BaseKVReceiver,
        BaseKVSender,
    )


class CommonKVManager(
    Rooms, Registrations, NoticesSilence, PrefillServers, LayerPairs, Verifies, BaseKVManager
):
    REMOVED = ("get_mha_kv_ptrs_with_pp", "get_mla_kv_ptrs_with_pp")

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
