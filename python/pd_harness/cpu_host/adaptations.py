"""What the CPU host changes in imported modules, and why."""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from pd_harness.cpu_host.adaptations_0_5_23 import NpuPoolTorch
from pd_harness.cpu_host.file_lock import FileLock
from pd_harness.cpu_host.import_hooks import on_import_of
from pd_harness.cpu_host.streams import NoEvent, NoStream
from pd_harness.releases import release

NPU_POOLS = "sglang.srt.hardware_backend.npu.memory_pool_npu"
NIXL_BUILDS = ("nixl_cu12._api", "nixl_cu13._api", "nixl_rocm._api")
MAX_TCP_COPIES = 512  # in one call to Mooncake's engine over TCP
SPINNING_NICE = 5  # of a thread in such a call
KEEP_ALIVE_S = 600
PROGRESS_DELAY_US = 10_000


@on_import_of("sglang.srt.disaggregation.ascend.transfer_engine")
def skip_hccl(transfer_engine: ModuleType) -> None:
    """Initialize MemFabric's DEVICE_RDMA without HCCL, which the engine starts on an NPU first."""
    engine = transfer_engine.AscendTransferEngine
    # A patch that has its own `initialize` renames the engine's.
    name = "_engine_initialize" if "_engine_initialize" in vars(engine) else "initialize"
    initialize = getattr(engine, name)

    def on_host(self):
        protocol = os.environ.get("ASCEND_MF_TRANSFER_PROTOCOL", "")
        if protocol.strip().lower() != "device_rdma":
            return initialize(self)
        kind = transfer_engine.TransferEngine.TransDataOpType.DEVICE_RDMA
        wanted = (self.store_url, self.session_id, self.role, self.npu_id, kind)
        if status := self.engine.initialize(*wanted):
            raise RuntimeError(f"MemFabric's initialize{wanted} returned {status}")

    setattr(engine, name, on_host)


@on_import_of("torch")
def stub_torch_streams(torch: ModuleType) -> None:
    """Stub streams and events, which the engine's PP event loop uses even on ``--device cpu``."""
    if torch.cuda.is_available():
        return
    make_tensor = torch.tensor

    @functools.wraps(make_tensor)
    def make_unpinned(*args, pin_memory=False, **kwargs):  # DP attention pins small tensors
        return make_tensor(*args, **kwargs)

    torch.cuda.Event = NoEvent
    torch.cuda.Stream = NoStream
    torch.cuda.current_stream = lambda device=None: NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext(stream)
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.synchronize = lambda device=None: None
    torch.tensor = make_unpinned


@on_import_of("sglang.srt.configs.update_config")
def disable_kv_head_padding(update_config: ModuleType) -> None:
    """Let the engine replicate KV heads as on an accelerator, instead of padding with dummy heads.

    With more TP ranks than KV heads the CPU engine pads the model.  A rank's heads then differ
    from those it would have on an NPU, and a correct head mapping looks wrong.
    """

    def unchanged(model_config, load_config, tp_size):
        return model_config

    update_config.adjust_config_with_unaligned_cpu_tp = unchanged


@on_import_of(*NIXL_BUILDS)
def map_vram_to_dram(nixl_api: ModuleType) -> None:
    """On the stock engine, let NIXL's "VRAM" mean host memory, where CPU pools are.

    The stock engine passes "VRAM" whatever the pool's device.  The patched engine passes the right
    memory type itself, and needs no change.
    """
    if is_engine_patched():
        return
    agent = nixl_api.nixl_agent
    make = agent.__init__

    def make_with_host_memory(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    agent.__init__ = make_with_host_memory


@on_import_of("mooncake.engine")
def limit_mooncake_batches(mooncake_engine: ModuleType) -> None:
    """Over TCP, limit Mooncake to `MAX_TCP_COPIES` copies at a time, for one caller of this server.

    Its TCP transport fails with some 2,000 concurrent copies in a process, and a caller spins until
    its copies are done: with more callers than cores, neither they nor anything else finishes in
    time. A server's processes share a folder for temporary files, and with it the lock. Callers
    yield to all other threads: one that writes to a stopped server spins for half a minute.
    """
    if not os.environ.get("MC_FORCE_TCP"):
        return
    engine = mooncake_engine.TransferEngine
    write = engine.batch_transfer_sync_write
    file_lock = FileLock("mooncake")

    def transfer_serialized(self, session, src, dst, lengths, *more, **options) -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SPINNING_NICE)
        for start in range(0, len(src), MAX_TCP_COPIES):
            batch = [column[start : start + MAX_TCP_COPIES] for column in (src, dst, lengths)]
            with file_lock.acquired():
                status = write(self, session, *batch, *more, **options)
            if status != 0:
                return status
        return 0

    engine.batch_transfer_sync_write = transfer_serialized


@on_import_of(*NIXL_BUILDS)
def throttle_nixl_progress(nixl_api: ModuleType) -> None:
    """Let the progress thread of NIXL's agents sleep between two polls.

    NIXL sets no delay, so each rank occupies a whole core even when it is idle, and a test machine
    may have two cores for all ranks.
    """
    config = nixl_api.nixlBind.nixlAgentConfig

    class PatientConfig(config):
        def __setattr__(self, name, value):
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    nixl_api.nixlBind.nixlAgentConfig = PatientConfig


@on_import_of("uvicorn.config")
def extend_keep_alive(uvicorn_config: ModuleType) -> None:
    """Let HTTP servers keep idle connections for longer than the router does.

    The engine closes an idle connection after 5 s. The router may be sending a request on it just
    then, more often the busier the machine is: one server gets the request, the other never does,
    and the client waits. 0.5.23 has SGLANG_TIMEOUT_KEEP_ALIVE for this.
    """
    make = uvicorn_config.Config.__init__

    @functools.wraps(make)
    def keeping(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.timeout_keep_alive = max(self.timeout_keep_alive, KEEP_ALIVE_S)

    uvicorn_config.Config.__init__ = keeping


@on_import_of("sglang.srt.distributed.parallel_state")
def use_torch_collectives(parallel_state: ModuleType) -> None:
    """Let DP attention's ranks exchange tensors through torch, as on an NPU.

    On other devices the engine calls its own operators, which it registers for CUDA alone.
    """
    group = parallel_state.GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    group.reduce_scatter_tensor = group._reduce_scatter_tensor
    if hasattr(group, "_all_to_all_single"):  # after 0.5.9
        group.all_to_all_single = group._all_to_all_single


@on_import_of("sglang.srt.layers.dp_attention")
def use_torch_dp_copy(dp_attention: ModuleType) -> None:
    """Copy a rank's tokens into, or out of, those of all DP attention ranks without Triton."""

    def copy(dst, src, dim, offset, sz, offset_src) -> None:
        rows = slice(int(offset), int(offset) + int(sz))
        if offset_src:
            dst[: int(sz)] = src[rows]
        else:
            dst[rows] = src[: int(sz)]

    dp_attention.memcpy_triton = copy


@contextlib.contextmanager
def with_npu_operators(memory_pool_npu: ModuleType) -> Iterator[None]:
    """Give the engine's NPU pools, and nothing else, the operators of ``torch_npu`` that they call.

    The stock module imports ``torch_npu``; the patched one does so on an NPU only, and gets it
    here.  Other modules must not find it, or they would assume that this machine has an NPU.
    """
    # Imports much of the engine, which must not see `torch_npu`.
    importlib.import_module("sglang.srt.mem_cache.memory_pool")
    operators = importlib.import_module("pd_harness.cpu_host.npu_operators")
    sys.modules["torch_npu"] = operators
    try:
        yield
    finally:
        del sys.modules["torch_npu"]
    memory_pool_npu.torch_npu = operators
    memory_pool_npu.torch = NpuPoolTorch("torch")


@on_import_of("sglang.srt.layers.attention.torch_native_backend")
def extend_torch_native_attention(torch_native_backend: ModuleType) -> None:
    """Compute only the new tokens of a prompt's chunk, and support DP padding.

    With DP attention the engine pads idle ranks and short batches with requests whose length each
    attention backend returns; the torch-native backend lacks that method.
    """
    from pd_harness.cpu_host.attention import extend

    backend = torch_native_backend.TorchNativeAttnBackend
    backend._run_sdpa_forward_extend = extend
    for graph in ("cuda", "cpu"):  # later releases call the second
        setattr(backend, f"get_{graph}_graph_seq_len_fill_value", lambda self: 1)


@on_import_of("sglang.srt.layers.attention.attention_registry")
def ascend_attention(attention_registry: ModuleType) -> None:
    """Register ``ascend`` as attention over the NPU pools without an NPU's kernels."""

    def make(runner):
        from pd_harness.cpu_host.ascend_attention import AscendAttention

        return AscendAttention(runner)

    attention_registry.ATTENTION_BACKENDS["ascend"] = make


@on_import_of("sglang.srt.speculative.eagle_utils")
def use_draft_chains(eagle_utils: ModuleType) -> None:
    """Build and verify chains of drafted tokens without ``sgl_kernel``, which only trees need."""
    from pd_harness.cpu_host import speculation

    if release() != "0.5.9":  # later releases use another module, see `adaptations_0_5_23`
        return
    eagle_utils.sgl_build_tree_kernel_efficient = speculation.build_chains
    eagle_utils.verify_tree_greedy_func = speculation.verify_chains


@on_import_of("sglang.srt.layers.attention.torch_native_backend")
def support_speculation(torch_native_backend: ModuleType) -> None:
    """Let the backend, which supports prompts and single tokens, also verify and draft."""
    from pd_harness.cpu_host.speculation import with_decode_lengths, with_extend_lengths

    backend = torch_native_backend.TorchNativeAttnBackend
    extend, decode = backend.forward_extend, backend.forward_decode
    backend.drafted = 0

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return extend(self, q, k, v, layer, with_extend_lengths(forward_batch), save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        batch = with_decode_lengths(forward_batch, self.drafted)
        return decode(self, q, k, v, layer, batch, save_kv_cache)

    backend.forward_extend, backend.forward_decode = forward_extend, forward_decode


@on_import_of("sglang.srt.speculative.draft_utils")
def use_runner_attention(draft_utils: ModuleType) -> None:
    """Let a draft model use its model runner's attention backend.

    For drafts the engine has no ``torch_native`` backend, and for ``ascend`` only NPU kernels.
    """
    from pd_harness.cpu_host.speculation import DraftSteps

    def steps(self):
        return DraftSteps(self.draft_model_runner.attn_backend, self.speculative_num_steps)

    factory = draft_utils.DraftBackendFactory
    factory.create_decode_backend = steps
    factory.create_draft_extend_backend = lambda self: self.draft_model_runner.attn_backend


@on_import_of("sglang.srt.models.deepseek_common.attention_backend_handler")
def force_absorbed_mla(attention_backend_handler: ModuleType) -> None:
    """Always compute MLA by the absorbed method, which reads K and V from the pool.

    The engine's other methods call NPU kernels, or bypass the pool.
    """
    method = attention_backend_handler.AttnForwardMethod.MLA
    for backend in ("ascend", "torch_native"):
        attention_backend_handler.AttentionBackendRegistry.register(
            backend, lambda attention, forward_batch: method
        )


def is_engine_patched() -> bool:
    """Whether the installed engine has the package that only the patch set adds."""
    engine = importlib.util.find_spec("sglang")
    return engine is not None and any(
        (Path(folder) / "srt" / "disaggregation" / "kv_layout" / "__init__.py").is_file()
        for folder in engine.submodule_search_locations
        if (Path(folder) / "__init__.py").is_file()
    )
