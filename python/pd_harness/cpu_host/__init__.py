"""Run the published engine on a machine that has no accelerator.

The CPU host stands in for what such a machine lacks, so that the engine's real prefill and decode
servers start and serve tiny models.  It is off unless ``SGLANG_PD_CPU_HOST=1`` is in the
environment (`scripts/cpu_host.sh` puts it there), and refuses to run beside a real ``torch_npu``.

All that the harness starts has a process group of its own, and stays in the session of the one who
started it. Linux weighs sessions against each other (autogroups), on each core by what they did
there last: with some servers on two cores a thread that had slept waited for up to 13 s until it
ran, and servers took each other for dead; in one session for 10 ms.
"""

from pd_harness.releases import release

SWITCH = "SGLANG_PD_CPU_HOST"

ENVIRONMENT = {
    SWITCH: "1",
    "SGLANG_USE_CPU_ENGINE": "1",  # the engine then takes "cpu" for its device
    "TRITON_INTERPRET": "1",  # paged allocation is a Triton kernel
    "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",  # else a CUDA build of torch brings NCCL in
    "OMP_NUM_THREADS": "1",  # ranks share the cores
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than all that is computed here
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # models are made on the spot, never fetched
    # Half a minute, not ten seconds: a server that waits for a core must not be taken for dead.
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "6",
    "MC_FORCE_TCP": "true",  # Mooncake without RDMA hardware
    # Over TCP NIXL's idle thread spins until UCX has looked after each new connection: some 20 s
    # with this, over a minute with its own 20s; with "inf" a write now and then does not start.
    "UCX_KEEPALIVE_INTERVAL": "1s",
}


def thread_binding(tp_size: int, pp_size: int) -> str:
    """Value of ``SGLANG_CPU_OMP_THREADS_BIND``: an entry for each rank.

    Stages share those of the first in 0.5.9, and have their own in later releases. Left unset, the
    engine wants one NUMA node per rank, which small machines do not have.
    """
    ranks = tp_size if release() == "0.5.9" else tp_size * pp_size
    return "|".join(str(rank) for rank in range(ranks))
