"""Switch the CPU host on at interpreter start.

The environments of `scripts/setup.sh` call `activate` from a ``.pth`` file, so that it runs in
every process of a server, including spawned ones.
"""

import gc
import importlib.util
import os
import sys
from types import ModuleType

from pd_harness.cpu_host import (
    SWITCH,
    adaptations,
    adaptations_0_5_23,
    idle,
    import_stubs,
    memfabric,
    scheduler_dump,
    thread_binding,
)
from pd_harness.cpu_host.import_hooks import after_import, around_import
from pd_harness.cpu_host.stock_sends import stock_sends
from pd_harness.cpu_host.stock_transfer import stock_transfer


def activate() -> None:
    """Install stand-ins for missing packages, and hook the modules that need an adaptation.

    Does nothing unless ``SGLANG_PD_CPU_HOST`` is set.

    Raises:
        SystemExit: the variable is not ``1``, or a real ``torch_npu`` is installed.
    """
    value = os.environ.get(SWITCH)
    if value is None:
        return
    if value != "1":
        sys.exit(f"{SWITCH} is {value!r}; set it to 1, or unset it to run without the CPU host")
    npu = importlib.util.find_spec("torch_npu")
    if npu is not None:
        sys.exit(
            f"{SWITCH}=1, but this machine has torch_npu ({npu.origin}): "
            "the CPU host never runs beside a real NPU; unset the variable"
        )
    # Importing the engine makes a million lasting objects; collecting among them takes a second.
    gc.set_threshold(100_000)
    import_stubs.install()
    memfabric.install()
    _bind_threads()
    after_import("torch", adaptations.stub_torch_streams)
    after_import("transformers.utils.import_utils", adaptations_0_5_23.hide_torchvision)
    after_import("sglang.srt.configs.update_config", adaptations.disable_kv_head_padding)
    for build in ("nixl_cu12", "nixl_cu13", "nixl_rocm"):
        after_import(f"{build}._api", adaptations.adapt_nixl)
    if os.environ.get("MC_FORCE_TCP"):
        after_import("mooncake.engine", adaptations.limit_mooncake_batches)
    after_import("uvicorn.config", adaptations.extend_keep_alive)
    engine = "sglang.srt"
    after_import(f"{engine}.disaggregation.mooncake.conn", _adapt_mooncake)
    after_import(f"{engine}.disaggregation.ascend.transfer_engine", adaptations.skip_hccl)
    after_import(
        f"{engine}.disaggregation.common.staging_buffer", adaptations_0_5_23.stage_in_host_memory
    )
    after_import(
        f"{engine}.disaggregation.common.staging_handler",
        adaptations_0_5_23.scatter_from_host_memory,
    )
    for name in adaptations_0_5_23.SLOT_MODULES:
        after_import(name, adaptations_0_5_23.install_slot_functions)
    around_import(f"{engine}.hardware_backend.npu.memory_pool_npu", adaptations.with_npu_operators)
    after_import(
        f"{engine}.layers.attention.torch_native_backend", adaptations.extend_torch_native_attention
    )
    after_import(f"{engine}.distributed.parallel_state", adaptations.use_torch_collectives)
    after_import(f"{engine}.layers.dp_attention", adaptations.use_torch_dp_copy)
    after_import(f"{engine}.layers.attention.attention_registry", adaptations.ascend_attention)
    after_import(
        f"{engine}.models.deepseek_common.attention_backend_handler", adaptations.force_absorbed_mla
    )
    after_import(f"{engine}.speculative.eagle_utils", adaptations.use_draft_chains)
    after_import("sglang.kernels.ops.speculative.spec_tree", adaptations_0_5_23.use_draft_chains)
    after_import(f"{engine}.speculative.draft_utils", adaptations.use_runner_attention)
    after_import(f"{engine}.managers.scheduler", _adapt_schedulers)
    after_import(f"{engine}.managers.data_parallel_controller", idle.throttle_controllers)
    after_import(f"{engine}.disaggregation.pd.local_layout", stock_transfer)
    after_import(f"{engine}.disaggregation.nixl.conn", stock_sends)
    after_import(f"{engine}.disaggregation.ascend.conn", stock_sends)


def _adapt_mooncake(module: ModuleType) -> None:
    adaptations_0_5_23.disable_pinned_page_indices(module)
    stock_sends(module)


def _adapt_schedulers(module: ModuleType) -> None:
    idle.throttle_schedulers(module)
    scheduler_dump.install_scheduler_dump(module)


def _bind_threads() -> None:
    """Bind one core per rank of the command line's sizes, unless the user has bound them."""
    words = [part for word in sys.orig_argv for part in word.split("=", 1)]
    given = dict(zip(words, words[1:]))

    def size(*flags: str) -> int:
        found = [int(given[flag]) for flag in flags if given.get(flag, "").isdigit()]
        return found[-1] if found else 1

    tp = size("--tp", "--tp-size", "--tensor-parallel-size")
    pp = size("--pp", "--pp-size", "--pipeline-parallel-size")
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", thread_binding(tp, pp))
