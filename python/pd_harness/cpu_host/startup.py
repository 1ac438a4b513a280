"""Switch the CPU host on at interpreter start.

The environments of `scripts/setup.sh` call `activate` from a ``.pth`` file, so that every process
of a server, spawned ones too, starts with it.
"""

import gc
import importlib.util
import os
import sys
from types import ModuleType

from pd_harness.cpu_host import (
    SWITCH,
    adaptations,
    idle,
    memfabric,
    name_only,
    newer,
    probe,
    thread_binding,
)
from pd_harness.cpu_host.engines_sends import engines_sends
from pd_harness.cpu_host.import_hooks import after_import, around_import
from pd_harness.cpu_host.stock_transfer import stock_transfer


def activate() -> None:
    """Offer stand-ins for what is not installed, and hook the modules that need an adaptation.

    Does nothing unless the switch is ``1``.

    Raises:
        SystemExit: the switch has another value, or a real ``torch_npu`` is installed.
    """
    value = os.environ.get(SWITCH)
    if value is None:
        return
    if value != "1":
        sys.exit(f"{SWITCH} is {value!r}; set it to 1, or leave it out to run without the CPU host")
    npu = importlib.util.find_spec("torch_npu")
    if npu is not None:
        sys.exit(
            f"{SWITCH}=1, but this machine has torch_npu ({npu.origin}): "
            "the CPU host never runs beside a real NPU; unset the variable"
        )
    # Importing the engine makes a million objects that stay; collecting among them takes a second.
    gc.set_threshold(100_000)
    name_only.install()
    memfabric.install()
    _bind_threads()
    after_import("torch", adaptations.torch_streams)
    after_import("transformers.utils.import_utils", newer.no_torchvision)
    after_import("sglang.srt.configs.update_config", adaptations.whole_kv_heads)
    for build in ("nixl_cu12", "nixl_cu13", "nixl_rocm"):
        after_import(f"{build}._api", adaptations.nixl_agents)
    if os.environ.get("MC_FORCE_TCP"):
        after_import("mooncake.engine", adaptations.few_copies_at_once)
    after_import("uvicorn.config", adaptations.kept_connections)
    engine = "sglang.srt"
    after_import(f"{engine}.disaggregation.mooncake.conn", _mooncake)
    after_import(f"{engine}.disaggregation.ascend.transfer_engine", adaptations.without_hccl)
    after_import(f"{engine}.disaggregation.common.staging_buffer", newer.staging_on_host)
    after_import(f"{engine}.disaggregation.common.staging_handler", newer.scatter_on_host)
    for name in newer.SLOT_MODULES:
        after_import(name, newer.slots_without_kernels)
    around_import(f"{engine}.hardware_backend.npu.memory_pool_npu", adaptations.npu_pools)
    after_import(
        f"{engine}.layers.attention.torch_native_backend", adaptations.torch_native_attention
    )
    after_import(f"{engine}.distributed.parallel_state", adaptations.gathers)
    after_import(f"{engine}.layers.dp_attention", adaptations.copies_between_ranks)
    after_import(f"{engine}.layers.attention.attention_registry", adaptations.ascend_attention)
    after_import(
        f"{engine}.models.deepseek_common.attention_backend_handler", adaptations.absorbed_mla
    )
    after_import(f"{engine}.speculative.eagle_utils", adaptations.chains_of_drafts)
    after_import("sglang.kernels.ops.speculative.spec_tree", newer.chains_of_drafts)
    after_import(f"{engine}.speculative.draft_utils", adaptations.draft_attention)
    after_import(f"{engine}.managers.scheduler", _schedulers)
    after_import(f"{engine}.managers.data_parallel_controller", idle.rested_controllers)
    after_import(f"{engine}.disaggregation.pd.describe", stock_transfer)
    after_import(f"{engine}.disaggregation.nixl.conn", engines_sends)
    after_import(f"{engine}.disaggregation.ascend.conn", engines_sends)


def _mooncake(module: ModuleType) -> None:
    newer.page_indices_unpinned(module)
    engines_sends(module)


def _schedulers(module: ModuleType) -> None:
    idle.rested_schedulers(module)
    probe.probed_schedulers(module)


def _bind_threads() -> None:
    """Name one core per rank, unless the user has, from the command line's sizes."""
    words = [part for word in sys.orig_argv for part in word.split("=", 1)]
    given = dict(zip(words, words[1:]))

    def size(*flags: str) -> int:
        found = [int(given[flag]) for flag in flags if given.get(flag, "").isdigit()]
        return found[-1] if found else 1

    tp = size("--tp", "--tp-size", "--tensor-parallel-size")
    pp = size("--pp", "--pp-size", "--pipeline-parallel-size")
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", thread_binding(tp, pp))
