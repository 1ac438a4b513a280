"""The engine's own sends in a patched prefill server of a later release (see `stock_transfer`).

There the patch set's sends are methods of a subclass, so deleting them leaves the engine's.
Notifications, layout descriptions and `SGLANG_PD_VERIFY` stay the patched engine's.
"""

import os
from types import ModuleType

from pd_harness.cpu_host.stock_transfer import STOCK_TRANSFER_VARIABLE
from pd_harness.releases import release

SEND_METHODS = {
    "MooncakeKVManager": ("send_kvcache", "send_kvcache_slice", "maybe_send_extra"),
    "AscendKVManager": ("send_kvcache",),
    "NixlKVManager": (
        *("_prepare_payload_xfer", "send_kvcache", "send_kvcache_slice", "maybe_send_extra"),
    ),
}


def stock_sends(connection: ModuleType) -> None:
    """Delete the patch set's sends from a backend's manager if the variable is set."""
    if not os.environ.get(STOCK_TRANSFER_VARIABLE) or release() == "0.5.9":
        return
    for manager, names in SEND_METHODS.items():
        for name in names:
            if name in vars(vars(connection).get(manager, object)):
                delattr(getattr(connection, manager), name)
