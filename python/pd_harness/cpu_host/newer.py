"""What releases after 0.5.9, and their packages, need besides `adaptations`."""

import sys
from types import ModuleType, SimpleNamespace


def no_torchvision(import_utils: ModuleType) -> None:
    """transformers 5 reads values out of torchvision when it is imported; ours has names alone."""
    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        if hasattr(import_utils, name):
            setattr(import_utils, name, lambda: False)


def page_indices_unpinned(conn: ModuleType) -> None:
    """Mooncake's page indices as NumPy's, for pinned memory takes an accelerator."""
    if hasattr(conn.MooncakeKVSender, "supports_host_tensor_indices"):
        conn.MooncakeKVSender.supports_host_tensor_indices = False


def staging_on_host(staging_buffer: ModuleType) -> None:
    """Staging buffers in host memory, filled and read by the engine's functions without Triton."""
    staging_buffer._STAGING_SUPPORTED_DEVICE_TYPES += ("cpu",)
    staging_buffer._USE_TRITON_STAGING = False


class TorchOfPools(ModuleType):
    """``torch`` for the module of NPU pools, which waits for copies of an NPU.

    Nobody else must see ``torch.npu``, and take this machine for one that has it.
    """

    npu = SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(sys.modules["torch"], name)
