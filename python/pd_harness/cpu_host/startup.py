"""Switch the CPU host on at interpreter start.

The environments of `scripts/setup.sh` call `activate` from a ``.pth`` file, so that it runs in
every process of a server, including spawned ones.
"""

import gc
import importlib.util
import os
import sys

# Some of these modules only mark functions with `on_import_of`.
from pd_harness.cpu_host import (  # noqa: F401
    SWITCH,
    adaptations,
    adaptations_0_5_23,
    idle,
    import_stubs,
    memfabric,
    packing_log,
    scheduler_dump,
    stock_transfer,
    thread_binding,
)
from pd_harness.cpu_host.import_hooks import HOOKS, after_import, around_import

_is_active = False


def activate() -> None:
    """Install stand-ins for missing packages, and hook the modules that need an adaptation.

    Does nothing unless ``SGLANG_PD_CPU_HOST`` is set, or if it has run before: Python 3.11 reads a
    virtual environment's ``.pth`` files twice.

    Raises:
        SystemExit: the variable is not ``1``, or a real ``torch_npu`` is installed.
    """
    global _is_active
    value = os.environ.get(SWITCH)
    if value is None or _is_active:
        return
    if value != "1":
        sys.exit(f"{SWITCH} is {value!r}; set it to 1, or unset it to run without the CPU host")
    npu = importlib.util.find_spec("torch_npu")
    if npu is not None:
        sys.exit(
            f"{SWITCH}=1, but this machine has torch_npu ({npu.origin}): "
            "the CPU host never runs beside a real NPU; unset the variable"
        )
    _is_active = True
    # Importing the engine makes a million lasting objects; collecting among them takes a second.
    gc.set_threshold(100_000)
    import_stubs.install()
    memfabric.install()
    _bind_threads()
    around_import(adaptations.NPU_POOLS, adaptations.with_npu_operators)
    for name, actions in HOOKS.items():
        after_import(name, *actions)


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
