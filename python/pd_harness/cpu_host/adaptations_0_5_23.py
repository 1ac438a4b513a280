"""Adaptations that releases after 0.5.9, and their packages, need in addition to `adaptations`.

Where 0.5.18 and 0.5.23 keep the same function in different modules, both modules are named.
"""

import functools
import logging
import sys
from types import ModuleType, SimpleNamespace

from pd_harness.cpu_host.import_hooks import on_import_of
from pd_harness.cpu_host.streams import NoStream

STAGING_LOG_LINE = "KV comes through a staging buffer"  # in decode's log
SLOT_MODULES = (
    "sglang.kernels.ops.kvcache.cache_move",
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.eagle",
    "sglang.srt.mem_cache.allocation",
    "sglang.srt.speculative.eagle_worker_common",  # 0.5.18
    "sglang.srt.speculative.spec_utils",  # 0.5.18
)
TREE_MODULES = (
    "sglang.kernels.ops.speculative.spec_tree",
    "sglang.srt.speculative.eagle_utils",  # 0.5.18
)


@on_import_of("transformers.utils.import_utils")
def hide_torchvision(import_utils: ModuleType) -> None:
    """Hide the torchvision stub from transformers 5, whose import reads torchvision's values."""
    for name in ("is_torchvision_available", "is_torchvision_v2_available"):
        if hasattr(import_utils, name):
            setattr(import_utils, name, lambda: False)


@on_import_of("sglang.srt.disaggregation.mooncake.conn")
def disable_pinned_page_indices(conn: ModuleType) -> None:
    """Let Mooncake use NumPy page indices, since pinned memory needs an accelerator."""
    if hasattr(conn.MooncakeKVSender, "supports_host_tensor_indices"):
        conn.MooncakeKVSender.supports_host_tensor_indices = False


@on_import_of("sglang.srt.disaggregation.common.staging_buffer")
def stage_in_host_memory(staging_buffer: ModuleType) -> None:
    """Put staging buffers in host memory; the engine's non-Triton functions gather and scatter.

    0.5.18 stages on CUDA only.
    """
    if not hasattr(staging_buffer, "_STAGING_SUPPORTED_DEVICE_TYPES"):
        return
    staging_buffer._STAGING_SUPPORTED_DEVICE_TYPES += ("cpu",)
    staging_buffer._USE_TRITON_STAGING = False
    make = staging_buffer.StagingBuffer.__init__

    @functools.wraps(make)
    def made(self, *args, **more):
        make(self, *args, **more)
        self.device = self.buffer.device  # without a device index

    staging_buffer.StagingBuffer.__init__ = made
    _stub_streams(staging_buffer)


def _stub_streams(module: ModuleType) -> None:
    """Replace the module's streams: torch's CPU streams do not name their device."""
    module.create_device_stream = lambda device: NoStream()
    module.device_stream_context = lambda stream: stream


def _create_logged_stream(device) -> NoStream:
    """A staging stream; logs the use of staging, which the engine does not log."""
    logging.getLogger(__name__).info(STAGING_LOG_LINE)
    return NoStream()


@on_import_of("sglang.srt.disaggregation.common.staging_handler")
def scatter_from_host_memory(staging_handler: ModuleType) -> None:
    """Let decode scatter a staging buffer into host memory, whose device has no index."""
    import torch

    if not hasattr(staging_handler, "create_device_stream"):  # 0.5.18
        return
    handler = staging_handler.DecodeStagingHandler
    make = handler.__init__
    indexed = SimpleNamespace(device=torch.device("cpu", 0))

    @functools.wraps(make)
    def made(self, *args, kv_buffer_info, **more):
        make(self, *args, kv_buffer_info={**kv_buffer_info, "k_buffers": [indexed]}, **more)
        self.kv_buffer_info = kv_buffer_info

    handler.__init__ = made
    _stub_streams(staging_handler)
    staging_handler.create_device_stream = _create_logged_stream


@on_import_of(*SLOT_MODULES)
def install_slot_functions(module: ModuleType) -> None:
    """Assign and move the slots of drafted tokens without ``sgl_kernel``."""
    from pd_harness.cpu_host import speculation_slots

    speculation_slots.install(module)


@on_import_of(*TREE_MODULES)
def use_draft_chains(module: ModuleType) -> None:
    """Build and verify chains of drafted tokens without ``sgl_kernel``, which only trees need."""
    from pd_harness.cpu_host import speculation

    if hasattr(module, "sgl_build_tree_kernel_efficient_cpu"):
        module.sgl_build_tree_kernel_efficient_cpu = speculation.build_chains
        module.sgl_verify_tree_greedy_cpu = speculation.verify_chains


class NpuPoolTorch(ModuleType):
    """``torch`` for the module of NPU pools, which waits for an NPU's copies.

    Other modules must not see ``torch.npu``, or they would assume that this machine has an NPU.
    """

    npu = SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(sys.modules["torch"], name)
