"""What the CPU host changes in imported modules, and why.  Each function takes the module."""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from pd_harness.cpu_host.adaptations_0_5_23 import NpuPoolTorch
from pd_harness.cpu_host.file_lock import FileLock
from pd_harness.cpu_host.streams import NoEvent, NoStream
from pd_harness.releases import release

MAX_TCP_COPIES = 512  # in one call to Mooncake's engine over TCP


KEEP_ALIVE_S = 600
PROGRESS_DELAY_US = 10_000


def skip_hccl(transfer_engine: ModuleType) -> None:
    """Before it asks MemFabric for DEVICE_RDMA the engine starts HCCL, by a tensor on an NPU."""
    engine = transfer_engine.AscendTransferEngine
    # Where a patch has its own, the engine's has another name.
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


def stub_torch_streams(torch: ModuleType) -> None:
    """Streams and events that the engine's pipeline loop names even on ``--device cpu``."""
    if torch.cuda.is_available():
        return
    torch.cuda.Event = NoEvent
    torch.cuda.Stream = NoStream
    torch.cuda.current_stream = lambda device=None: NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext(stream)
    torch.cuda.set_stream = lambda stream: None
    torch.cuda.synchronize = lambda device=None: None
    torch.tensor = _without_pinning(torch.tensor)


def _without_pinning(make):
    """With DP attention the engine pins small tensors for a copy that here there is not."""

    @functools.wraps(make)
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


def disable_kv_head_padding(update_config: ModuleType) -> None:
    """Let KV heads be replicated as on an accelerator, rather than padded with dummy ones.

    With more TP ranks than KV heads the CPU engine pads the model with dummy heads.  A rank then
    does not hold the heads that it would hold on an NPU, and a right head mapping looks wrong.
    """

    def unchanged(model_config, load_config, tp_size):
        return model_config

    update_config.adjust_config_with_unaligned_cpu_tp = unchanged


def map_vram_to_dram(nixl_api: ModuleType) -> None:
    """On the stock engine, let NIXL's "VRAM" mean host memory, where CPU pools lie.

    The stock engine names "VRAM" whatever the pool's device.  The patch set's engine names the
    right kind itself, so there NIXL stays as it is.
    """
    if is_engine_patched():
        return
    agent = nixl_api.nixl_agent
    make = agent.__init__

    def make_with_host_memory(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    agent.__init__ = make_with_host_memory


def limit_mooncake_batches(mooncake_engine: ModuleType) -> None:
    """Let Mooncake's engines make few copies at a time, for one caller of this server.

    Its TCP transport fails with some 2,000 copies under way in a process, and a caller spins until
    its copies have ended: with more callers than cores none ends in time, nor does anything else. A
    server's processes share a folder for temporary files, and so their turn.
    """
    engine = mooncake_engine.TransferEngine
    write = engine.batch_transfer_sync_write
    file_lock = FileLock("mooncake")

    def transfer_serialized(self, session, src, dst, lengths, *more, **options) -> int:
        for start in range(0, len(src), MAX_TCP_COPIES):
            batch = [column[start : start + MAX_TCP_COPIES] for column in (src, dst, lengths)]
            with file_lock.acquired():
                status = write(self, session, *batch, *more, **options)
            if status != 0:
                return status
        return 0

    engine.batch_transfer_sync_write = transfer_serialized


def adapt_nixl(nixl_api: ModuleType) -> None:
    """Both changes to NIXL."""
    map_vram_to_dram(nixl_api)
    throttle_nixl_progress(nixl_api)


def throttle_nixl_progress(nixl_api: ModuleType) -> None:
    """Let the progress thread of NIXL's agents sleep between two looks.

    NIXL gives it no delay, so that each rank burns a whole core, also when it is idle; here they
    have two cores in all.
    """
    config = nixl_api.nixlBind.nixlAgentConfig

    class PatientConfig(config):
        def __setattr__(self, name, value):
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    nixl_api.nixlBind.nixlAgentConfig = PatientConfig


def extend_keep_alive(uvicorn_config: ModuleType) -> None:
    """Let HTTP servers keep idle connections for longer than the router does.

    The engine closes one after 5 s. The router may be writing a request to it just then, more
    often the busier the machine is: one server has the request, the other never hears of it, and
    the client waits. 0.5.23 has SGLANG_TIMEOUT_KEEP_ALIVE for it.
    """
    make = uvicorn_config.Config.__init__

    @functools.wraps(make)
    def keeping(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.timeout_keep_alive = max(self.timeout_keep_alive, KEEP_ALIVE_S)

    uvicorn_config.Config.__init__ = keeping


def use_torch_collectives(parallel_state: ModuleType) -> None:
    """Let DP attention's ranks exchange tensors through torch, as the engine does on an NPU.

    Elsewhere it calls operators of its own for that, which it registers for CUDA alone.
    """
    group = parallel_state.GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    group.reduce_scatter_tensor = group._reduce_scatter_tensor
    if hasattr(group, "_all_to_all_single"):  # after 0.5.9
        group.all_to_all_single = group._all_to_all_single


def use_torch_dp_copy(dp_attention: ModuleType) -> None:
    """DP attention's copy of a rank's tokens among those of all, or out of them, without Triton."""

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

    The stock module imports ``torch_npu``; the patched one does so on an NPU only, and has it from
    here.  Whoever else asks finds none, for it would take this machine for one with an NPU.
    """
    importlib.import_module("sglang.srt.mem_cache.memory_pool")  # imports half the world
    operators = importlib.import_module("pd_harness.cpu_host.npu_operators")
    sys.modules["torch_npu"] = operators
    try:
        yield
    finally:
        del sys.modules["torch_npu"]
    memory_pool_npu.torch_npu = operators
    memory_pool_npu.torch = NpuPoolTorch("torch")


def extend_torch_native_attention(torch_native_backend: ModuleType) -> None:
    """Compute the new tokens of a prompt's chunk, and not all before them again; pad for DP; draft.

    With DP attention idle ranks and short batches are padded by requests of a length that each
    attention backend names, and this one does not.
    """
    from pd_harness.cpu_host.attention import extend

    backend = torch_native_backend.TorchNativeAttnBackend
    backend._run_sdpa_forward_extend = extend
    for graph in ("cuda", "cpu"):  # later releases ask for the second
        setattr(backend, f"get_{graph}_graph_seq_len_fill_value", lambda self: 1)
    support_speculation(torch_native_backend)


def ascend_attention(attention_registry: ModuleType) -> None:
    """Let ``ascend`` be attention over the NPU pools without an NPU's kernels."""

    def make(runner):
        from pd_harness.cpu_host.ascend_attention import AscendAttention

        return AscendAttention(runner)

    attention_registry.ATTENTION_BACKENDS["ascend"] = make


def use_draft_chains(eagle_utils: ModuleType) -> None:
    """Build and verify chains of drafted tokens without ``sgl_kernel``, which trees take."""
    from pd_harness.cpu_host import speculation

    if release() != "0.5.9":  # which has another module for that, see `newer`
        return
    eagle_utils.sgl_build_tree_kernel_efficient = speculation.build_chains
    eagle_utils.verify_tree_greedy_func = speculation.verify_chains


def support_speculation(torch_native_backend: ModuleType) -> None:
    """Let the backend, which knows prompts and single tokens, verify and draft."""
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


def use_runner_attention(draft_utils: ModuleType) -> None:
    """Let a draft have the attention that its model runner has.

    The engine knows none for ``torch_native``, and an NPU's kernels alone for ``ascend``.
    """
    from pd_harness.cpu_host.speculation import DraftSteps

    def steps(self):
        return DraftSteps(self.draft_model_runner.attn_backend, self.speculative_num_steps)

    factory = draft_utils.DraftBackendFactory
    factory.create_decode_backend = steps
    factory.create_draft_extend_backend = lambda self: self.draft_model_runner.attn_backend


def force_absorbed_mla(attention_backend_handler: ModuleType) -> None:
    """Compute MLA by the absorbed method, which takes K and V from the pool, at all times.

    What else the engine would choose calls an NPU's kernels, or takes K and V past the pool.
    """
    method = attention_backend_handler.AttnForwardMethod.MLA
    for backend in ("ascend", "torch_native"):
        attention_backend_handler.AttentionBackendRegistry.register(
            backend, lambda attention, forward_batch: method
        )


def is_engine_patched() -> bool:
    """Whether the installed engine holds the package that only the patch set brings."""
    engine = importlib.util.find_spec("sglang")
    return engine is not None and any(
        (Path(folder) / "srt" / "disaggregation" / "kv_layout" / "__init__.py").is_file()
        for folder in engine.submodule_search_locations
        if (Path(folder) / "__init__.py").is_file()
    )
