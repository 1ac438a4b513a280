"""Run the published engine on a machine without an accelerator.

The CPU host replaces what such a machine lacks, so that the engine's real prefill and decode
servers start and serve tiny models.  It is off unless ``SGLANG_PD_CPU_HOST=1`` is in the
environment (`scripts/cpu_host.sh` sets it), and refuses to run next to a real ``torch_npu``.

Everything that the harness starts has its own process group but stays in its parent's session.
Linux schedules sessions against each other (autogroups), on each core by their recent load there:
with several servers on two cores, each in its own session, a thread that woke up waited up to 13 s
for a core, and servers considered each other dead; in one session it waits 10 ms.
"""

from pd_harness.releases import release

SWITCH = "SGLANG_PD_CPU_HOST"

ENVIRONMENT = {
    SWITCH: "1",
    "SGLANG_USE_CPU_ENGINE": "1",  # makes the engine's device "cpu"
    "TRITON_INTERPRET": "1",  # paged allocation is a Triton kernel
    "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",  # else a CUDA build of torch loads NCCL
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than everything computed here
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # models are made locally, never downloaded
    # Half a minute, not ten seconds: a server that waits for a core must not count as dead.
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "6",
    "MC_FORCE_TCP": "true",  # Mooncake without RDMA hardware
    # Over TCP, NIXL's idle thread spins until UCX has checked each new connection: some 20 s with
    # this value, over a minute with UCX's default of 20s; with "inf" some writes never start.
    "UCX_KEEPALIVE_INTERVAL": "1s",
}


def thread_binding(tp_size: int, pp_size: int) -> str:
    """Value of ``SGLANG_CPU_OMP_THREADS_BIND``: an entry for each rank.

    In 0.5.9 and 0.5.18 all stages share the first stage's entries; in 0.5.23 each has its own.
    Without the variable the engine needs one NUMA node per rank, which small machines lack.
    """
    ranks = tp_size if release() in ("0.5.9", "0.5.18") else tp_size * pp_size
    return "|".join(str(rank) for rank in range(ranks))
