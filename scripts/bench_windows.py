"""The sliding-window part of `bench_plan.py`: state that is sent over NIXL, and NIXL's own cost.

A request's window is sent in every layer that has one: with pages of one token that is a quarter of
a million copies. NIXL is real here, between two agents of this process; it makes each transfer but
does not start it. The memory is the host's, and its pages are never touched.
"""

import functools
import uuid
from types import SimpleNamespace

import bench_0_5_23
import numpy as np

WINDOW = 4096  # tokens
LAYERS = 30
HEADS = 8
TOKEN_BYTES = 64  # of all heads; NIXL's cost depends on the number of copies, not their size
PAGE_SIZES = (1, 64)
HOST_MEMORY = "DRAM"


def layout(kv_layout, page_size: int):
    """`RankLayout` of a model with `LAYERS` layers that have a window, and one that has none."""
    pages = 2 * held(page_size)
    heads = kv_layout.Heads(0, HEADS, HEADS)

    def buffer(component: str, layer: int):
        return kv_layout.Buffer(component, False, layer, page_size * TOKEN_BYTES, heads, pages)

    kv = tuple(buffer(component, LAYERS) for component in "kv")
    state = tuple(buffer(f"swa_{component}", n) for component in "kv" for n in range(LAYERS))
    of_rank = (0, 1, 0, 1, page_size, "bfloat16", "VRAM", LAYERS + 1)
    return kv_layout.RankLayout(*of_rank, kv, state)


def held(page_size: int) -> int:
    """The number of pages in a window."""
    return WINDOW // page_size


@functools.cache
def memory(of_rank, side: int) -> tuple[np.ndarray, list[int], list[int]]:
    """All buffers of this rank in one block, and the addresses of KV's and of the state's."""
    buffers = (*of_rank.kv, *of_rank.state)
    sizes = [buffer.page_bytes * buffer.pages for buffer in buffers]
    block = np.zeros(sum(sizes), np.uint8)
    starts = np.cumsum([block.ctypes.data, *sizes])[:-1].tolist()
    return block, starts[: len(of_rank.kv)], starts[len(of_rank.kv) :]


class NixlAgents:
    """An agent that makes transfers to `peer` in host memory, but does not start them."""

    def __init__(self, own, theirs, peer: str):
        from nixl._api import nixl_agent, nixl_agent_config  # only in an engine's environment

        self.blocks = [memory(one, side)[0] for side, one in enumerate((own, theirs), 1)]
        alone = nixl_agent_config(enable_prog_thread=False)  # the bench would count its time
        self.agents = [nixl_agent(name, alone) for name in (str(uuid.uuid4()), peer)]
        for agent, block in zip(self.agents, self.blocks):
            agent.register_memory([(block.ctypes.data, block.nbytes, 0, "")], HOST_MEMORY)
        self.agent, other = self.agents
        self.agent.add_remote_agent(other.get_agent_metadata())

    def get_xfer_descs(self, rows, kind):
        return self.agent.get_xfer_descs(rows, HOST_MEMORY)

    def prep_xfer_dlist(self, peer, runs, kind):
        return self.agent.prep_xfer_dlist(peer, runs, HOST_MEMORY)

    def make_prepped_xfer(self, *chosen):
        return self.agent.make_prepped_xfer(*chosen)

    def initialize_xfer(self, operation, src, dst, peer, notif=b""):
        return self.agent.initialize_xfer(operation, src, dst, peer, notif)

    def transfer(self, handle) -> str:
        return "DONE"


def add_state(manager, info: SimpleNamespace, own, peer, later: bool) -> None:
    """Set the manager's and the peer's state attributes; later releases have lists by type."""
    lengths = [buffer.page_bytes for buffer in own.state]
    sizes = [buffer.page_bytes * buffer.pages for buffer in own.state]
    lists = {"data_ptrs": memory(own, 1)[2], "item_lens": lengths, "data_lens": sizes}
    theirs = {**lists, "data_ptrs": memory(peer, 2)[2]}
    if not later:
        manager.kv_args.state_type = "swa"
        vars(manager.kv_args).update({f"state_{name}": one for name, one in lists.items()})
        info.dst_state_data_ptrs = theirs["data_ptrs"]
        return
    from sglang.srt.disaggregation.base.conn import StateType

    vars(manager.kv_args).update({f"state_{name}": [one] for name, one in lists.items()})
    vars(manager.kv_args).update(state_types=[StateType.SWA], state_layer_ids=[[]])
    vars(info).update({f"dst_state_{name}": [one] for name, one in theirs.items()})
    vars(info).update(dst_state_layer_ids=[[]], dst_dcp_size=1)
    vars(manager).update(
        _prepared_state_plans={},
        _state_layout_rejections={},
        _prepared_state_components=frozenset({0}),  # the same as on CUDA
        attn_cp_size=1,
        dcp_size=1,
        state_tp_size=1,
    )


def make_state_call(manager, info: SimpleNamespace, peer: str, notice: str, later: bool):
    """A function `(src_pages, dst_pages)` that makes the engine's call for a request's state."""
    send, pointers = manager.maybe_send_extra, info.dst_state_data_ptrs
    if not later:
        return lambda src, dst: send(peer, src, pointers, dst, 0, notice, 1)
    # Stock prepares its own lists; 0.5.18's none.
    if hasattr(manager, "_prepare_state_xfer") and not hasattr(manager, "prepared"):
        manager._prepare_state_xfer(info)
        if peer not in manager._prepared_state_plans:
            raise RuntimeError("the engine prepares no lists for this state")
    more = {"dst_state_item_lens": info.dst_state_item_lens, "dst_state_layer_ids": [[]]}
    tail = (0, *bench_0_5_23.notices(send, notice), 1)
    return lambda src, dst: list(send(peer, [src], pointers, [dst], *tail, **more))
