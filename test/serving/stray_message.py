"""A message from a process that is not a peer, such as a scanner or a health check."""

import httpx
import zmq

from pd_harness import cluster

# The releases' query parameters for a rank; engine_rank and target_dp_group are 0.5.9's.
TENSOR_RANK = ("engine_rank", "target_tp_rank")
DATA_RANK = ("target_dp_group", "prefill_dp_rank", "prefill_cp_rank")
STAGE = "target_pp_rank"
LINGER_MS = 5000  # limit for sending the message


def send_stray_message(prefill: cluster.Server, topology: cluster.Topology, message: bytes) -> None:
    """Sends a message to the socket of each prefill rank on which decode ranks register."""
    for stage in range(topology.prefill_pp):
        for rank in range(topology.prefill_tp):
            with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
                socket.setsockopt(zmq.LINGER, LINGER_MS)
                socket.connect(_rank_address(prefill, stage, rank))
                socket.send(message)


def _rank_address(prefill: cluster.Server, stage: int, rank: int) -> str:
    place = {STAGE: stage, **dict.fromkeys(TENSOR_RANK, rank), **dict.fromkeys(DATA_RANK, 0)}
    url = f"http://{cluster.HOST}:{prefill.bootstrap_port}/route"
    found = httpx.get(url, params=place, trust_env=False).raise_for_status().json()
    return f"tcp://{found['rank_ip']}:{found['rank_port']}"
