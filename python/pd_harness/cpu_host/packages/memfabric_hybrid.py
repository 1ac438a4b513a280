"""MemFabric's transfer engine as the engine calls it, carried by a real Mooncake engine over TCP.

Like MemFabric it copies between registered memory of two processes, and nothing else: Mooncake
refuses addresses that their owner has not registered.  Calls return 0, or a number below 0.
"""

import enum


def create_config_store(url: str) -> int:
    """Open the store at ``url``, where MemFabric's engines meet; Mooncake's need none.

    Raises:
        ValueError: there is no URL.
    """
    if not url:
        raise ValueError(f"the store's URL is {url!r}")
    return 0


class TransferEngine:
    """One process's end of transfers.

    Raises:
        RuntimeError: Mooncake's engine does not start.
    """

    class TransDataOpType(enum.Enum):
        SDMA = 0
        DEVICE_RDMA = 1

    def __init__(self):
        from mooncake.engine import TransferEngine as Mooncake

        try:
            from sglang.srt.utils.network import get_local_ip_auto
        except ImportError:  # 0.5.9
            from sglang.srt.utils import get_local_ip_auto

        # Here, not in `initialize`: before that the engine makes its session id, by which peers
        # reach it, of this host and `get_rpc_port()`.
        self.carrier = Mooncake()
        host = get_local_ip_auto()
        status = self.carrier.initialize(host, "P2PHANDSHAKE", "tcp", "")
        if status != 0:
            raise RuntimeError(f"Mooncake's engine did not start on {host}: status {status}")

    def get_rpc_port(self) -> int:
        """The port of this end's session id, ``host:port``."""
        return self.carrier.get_rpc_port()

    def initialize(
        self, store_url: str, session_id: str, role: str, device_id: int, op_type: TransDataOpType
    ) -> int:
        """Join the store at ``store_url``, as "Prefill" or "Decode"."""
        return 0 if store_url and role in ("Prefill", "Decode") else -1

    def register_memory(self, address: int, length: int) -> int:
        return self.carrier.register_memory(address, length)

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        return self.carrier.batch_register_memory(addresses, lengths)

    def unregister_memory(self, address: int) -> int:
        return self.carrier.unregister_memory(address)

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        return self.carrier.batch_unregister_memory(addresses)

    def send_probe(self, session_id: str) -> int:
        """Ask whether a peer is there; releases after 0.5.9 do."""
        return self.carrier.send_probe(session_id)

    def transfer_sync_write(self, session_id: str, src: int, dst: int, length: int) -> int:
        return self.batch_transfer_sync_write(session_id, [src], [dst], [length])

    def batch_transfer_sync_write(
        self, session_id: str, src: list[int], dst: list[int], lengths: list[int]
    ) -> int:
        """Copy ``lengths[i]`` bytes from ``src[i]`` here to ``dst[i]`` there, for each ``i``."""
        return self.carrier.batch_transfer_sync_write(session_id, src, dst, lengths)
