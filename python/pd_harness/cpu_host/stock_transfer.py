"""The stock engine's transfer code in a patched prefill server, to test what verification finds.

With `SGLANG_PD_STOCK_TRANSFER` (the folder `sglang/` of a stock engine) a prefill rank sends KV and
state by that engine's methods, with the item lengths and the state that its pools would register.
The rest is the patched engine's: notifications, layout descriptions, and `SGLANG_PD_VERIFY`.
Set `SGLANG_PD_PACKED=0`, too: stock's methods send slices, which decode must not interleave.
"""

import contextlib
import copy
import functools
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from pd_harness.cpu_host.adaptations import with_npu_operators
from pd_harness.cpu_host.import_hooks import on_import_of
from pd_harness.releases import release

STOCK_TRANSFER_VARIABLE = "SGLANG_PD_STOCK_TRANSFER"
DISAGGREGATION = "srt/disaggregation"
NPU_POOLS = Path("srt/hardware_backend/npu/memory_pool_npu.py")
BACKENDS = {"nixl": ["nixl"], "mooncake": ["mooncake"], "ascend": ["ascend", "mooncake"]}
SENDS = ("send_kvcache", "send_kvcache_slice", "maybe_send_extra")
SEND_METHODS = {
    "MooncakeKVManager": SENDS,
    "AscendKVManager": ("send_kvcache",),
    "NixlKVManager": ("_prepare_payload_xfer", *SENDS),
}


@on_import_of(*(f"sglang.srt.disaggregation.{backend}.conn" for backend in BACKENDS))
def restore_engine_sends(conn: ModuleType) -> None:
    """After 0.5.9, give a backend's manager the engine's sends again if the variable is set.

    The patch set's are methods of a subclass.
    """
    if not os.environ.get(STOCK_TRANSFER_VARIABLE) or release() == "0.5.9":
        return
    for manager, names in SEND_METHODS.items():
        engine = vars(conn).get(f"Engine{manager}")
        for name in names if engine else ():
            setattr(getattr(conn, manager), name, getattr(engine, name))


@on_import_of("sglang.srt.disaggregation.pd.local_layout")
def wrap_make_kv_manager(local_layout: ModuleType) -> None:
    """In 0.5.9, let the module's `make_kv_manager` install stock's sends in prefill."""
    if release() != "0.5.9":
        return
    make = local_layout.make_kv_manager

    @functools.wraps(make)
    def make_with_stock_transfer(queue, kv_args, mode):
        manager = make(queue, kv_args, mode)
        folder = os.environ.get(STOCK_TRANSFER_VARIABLE)
        if folder and mode.value == "prefill":
            _install_stock_sends(manager, Path(folder), queue)
        return manager

    local_layout.make_kv_manager = make_with_stock_transfer


def _install_stock_sends(manager, folder: Path, queue) -> None:
    backend = type(manager).__module__.split(".")[-2]
    names = [*BACKENDS[backend], "common"]
    modules = [_load_stock_module(folder / DISAGGREGATION / name / "conn.py") for name in names]
    classes = [
        next(one for name, one in vars(module).items() if _is_manager(name, one, module))
        for module in modules
    ]
    stock = _StockManager(manager, classes, _stock_args(manager.kv_args, folder, queue))
    sends = _NixlSends if backend == "nixl" else _QueuedSends
    borrowed = sends(manager, stock)
    manager.send_kvcache = borrowed.send_kvcache
    if manager.kv_args.state_type != "none":
        manager.maybe_send_extra = borrowed.maybe_send_extra


def _is_manager(name: str, one: object, module: ModuleType) -> bool:
    return name.endswith("KVManager") and getattr(one, "__module__", "") == module.__name__


@functools.cache
def _load_stock_module(file: Path) -> ModuleType:
    """A stock module under its own name; its imports are the patched engine's modules."""
    spec = importlib.util.spec_from_file_location("stock_" + "_".join(file.parts[-3:-1]), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses need the entry
    with with_npu_operators(module) if file.name == NPU_POOLS.name else contextlib.nullcontext():
        spec.loader.exec_module(module)
    return module


def _stock_args(args, folder: Path, queue) -> SimpleNamespace:
    """``args`` as stock registers them: its item lengths, and the target model's state only."""
    changed = copy.copy(args)
    pools = (queue.token_to_kv_pool, queue.draft_token_to_kv_pool)
    changed.kv_item_lens = []
    for pool in filter(None, pools):
        owner = type(pool)
        if owner.__module__.endswith(NPU_POOLS.stem):
            owner = vars(_load_stock_module(folder / NPU_POOLS))[owner.__name__]
        changed.kv_item_lens += owner.get_contiguous_buf_infos(pool)[2]
    targets = sum(not buffer.draft for buffer in args.layout.state)
    for name in ("state_data_ptrs", "state_data_lens", "state_item_lens"):
        setattr(changed, name, getattr(args, name)[:targets])
    return changed


class _StockManager:
    """A manager as stock's methods see it: stock's own methods first, then the manager's."""

    def __init__(self, manager, classes: list[type], args):
        self._manager, self._classes, self.kv_args = manager, classes, args

    def __getattr__(self, name: str):
        for one in self._classes:
            if callable(method := vars(one).get(name)):
                return functools.partial(method, self)
        return getattr(self._manager, name)

    @property
    def agent(self):
        """NIXL's agent; "VRAM" becomes the memory type that the patched engine registers."""
        return _StockAgent(self._manager.agent, self._manager.kv_args.layout.memory)


class _StockAgent:
    def __init__(self, agent, memory: str):
        self._agent, self._memory = agent, memory

    def __getattr__(self, name: str):
        return getattr(self._agent, name)

    def get_xfer_descs(self, descs, kind):
        return self._agent.get_xfer_descs(descs, self._memory if kind == "VRAM" else kind)


class _NixlSends:
    def __init__(self, manager, stock: _StockManager):
        self.manager, self.stock = manager, stock

    def send_kvcache(self, peer, pages, dst_ptrs, dst_pages, gpu, notif):
        info, stock = self.manager.decode_kv_args_table[peer], self.stock
        send, sizes = stock.send_kvcache, ()
        if not (stock.is_mla_backend or info.decode_tp_size == stock.attn_tp_size):
            send = stock.send_kvcache_slice
            sizes = (stock.attn_tp_size, info.decode_tp_size, info.decode_tp_rank)
            sizes = (*sizes, info.dst_kv_item_len)
        return self._write(peer, notif, send(peer, pages, dst_ptrs, dst_pages, gpu, notif, *sizes))

    def maybe_send_extra(self, peer, pages, dst_ptrs, dst_pages, gpu, notif, decode_tp_size):
        dst_ptrs = dst_ptrs[: len(self.stock.kv_args.state_data_ptrs)]
        arguments = (peer, pages, dst_ptrs, dst_pages, gpu, notif, decode_tp_size)
        return self._write(peer, notif, self.stock.maybe_send_extra(*arguments))

    def _write(self, peer: str, notif: str, handle):
        from sglang.srt.disaggregation.pd.nixl_transfers import Transfer

        if handle is None:
            return None
        write = Transfer(int(notif.split("_")[0]), peer, handle)
        self.manager.transfers.add(write)
        return write


class _QueuedSends:
    def __init__(self, manager, stock: _StockManager):
        self.manager, self.stock = manager, stock

    def send_kvcache(self, session, pages, dst_ptrs, dst_pages, executor):
        info, stock = self.manager.decode_kv_args_table[session], self.stock
        if stock.is_mla_backend or info.dst_attn_tp_size == stock.attn_tp_size:
            return stock.send_kvcache(session, pages, dst_ptrs, dst_pages, executor)
        sizes = (info.dst_tp_rank, info.dst_attn_tp_size, info.dst_kv_item_len)
        return stock.send_kvcache_slice(session, pages, dst_ptrs, dst_pages, *sizes, executor)

    def maybe_send_extra(self, req, pages, dst_ptrs, executor, info=None):
        dst_ptrs = dst_ptrs[: len(self.stock.kv_args.state_data_ptrs)]
        return self.stock.maybe_send_extra(req, pages, dst_ptrs, executor, info)
