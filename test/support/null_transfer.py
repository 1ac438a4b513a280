"""Transfer libraries that write nothing, so that only the ranks' messages remain of a request.

They have no NIXL notifications, which end requests in 0.5.9 and stock 0.5.18.
"""

import socket
import struct

LENGTH = "<Q"  # of the name in an agent's metadata


class NullAgent:
    """Stands in for `nixl_agent`."""

    def __init__(self, name: str, *config):
        self.name = name
        self.peers: set[str] = set()
        self.nixl_mems = {"DRAM": 0, "VRAM": 1}

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def create_backend(self, *given) -> None:
        pass

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return {"num_threads": "8"}

    def get_agent_metadata(self) -> bytes:
        return struct.pack(LENGTH, len(self.name)) + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata[struct.calcsize(LENGTH) :].decode()
        self.peers.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.peers.discard(name)

    def check_remote_metadata(self, name: str) -> bool:
        return name in self.peers

    def get_xfer_descs(self, *given):
        return given

    register_memory = prep_xfer_dlist = make_prepped_xfer = get_xfer_descs

    def initialize_xfer(self, *given) -> str:
        return "handle"  # keeps no lists

    def transfer(self, handle) -> str:
        return "DONE"

    check_xfer_state = transfer

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def release_xfer_handle(self, handle) -> None:
        pass


class NullEngine:
    """Stands in for the engine's `MooncakeTransferEngine`."""

    def __init__(self):
        self.port = socket.socket()
        self.port.bind(("127.0.0.1", 0))

    def get_session_id(self) -> str:
        return "{}:{}".format(*self.port.getsockname())

    def batch_register(self, *given) -> int:
        return 0

    def batch_transfer_sync(self, *given) -> int:
        return 0

    def send_probe(self, session: str) -> int:
        return 0


def use_null_transfer(backend: str) -> None:
    """Gives this process's KV managers a null transfer library; call it before they are made."""
    if backend == "nixl":
        from nixl import _api

        _api.nixl_agent = NullAgent
    else:
        from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as module

        module._mooncake_transfer_engine = NullEngine()
        module.init_mooncake_transfer_engine = lambda *given: module._mooncake_transfer_engine
