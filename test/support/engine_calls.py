"""Calls of the engine's own classes, with plain data as results.

The tests call these functions in the patched engine. `python engine_calls.py CALLS` runs them in
another engine, such as stock, and prints the results as JSON. CALLS is JSON: `[[NAME, ARG...]...]`.
"""

import functools
import importlib
import inspect
import json
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from engine_release import SINCE_0_5_18
from pp_stages import run_stages  # noqa: F401 - a probe
from sglang.srt.disaggregation import prefill as _before_the_managers  # noqa: F401
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.ascend.conn import AscendKVManager
from sglang.srt.disaggregation.ascend.transfer_engine import AscendTransferEngine
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.hardware_backend.npu.memory_pool_npu import (
    NPUMHATokenToKVPool,
    NPUMLATokenToKVPool,
)

from pd_harness.device import device
from pd_harness.parallel_context import single_rank_context

# KV heads, their width, and the parts of an MLA token
HEADS, WIDTH, LATENT, ROPE, INDEX = 2, 8, 16, 4, 6


def _common(layers: int, start_layer: int, page_size: int) -> dict:
    return {
        "size": 4 * page_size,
        "page_size": page_size,
        "dtype": torch.float32,
        "layer_num": layers,
        "device": device(),
        "enable_memory_saver": False,
        "start_layer": start_layer,
        "end_layer": start_layer + layers - 1,
    }


def mha_pool(fia: bool, page_size: int, start_layer: int = 0, layers: int = 2, **more):
    sizes = {"head_num": HEADS, "head_dim": WIDTH, **_common(layers, start_layer, page_size)}
    with mock.patch.dict(os.environ, ASCEND_USE_FIA=str(fia)):
        return NPUMHATokenToKVPool(**{**sizes, **more})


def mla_pool(
    index_keys: bool,
    page_size: int,
    start_layer: int = 0,
    layers: int = 2,
    ranks: dict[str, int] | None = None,
    **more,
):
    sizes = {
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "index_head_dim": INDEX if index_keys else None,
        **_common(layers, start_layer, page_size),
    }
    with single_rank_context(**ranks or {}):
        return NPUMLATokenToKVPool(**{**sizes, **more})


# Pools by kind, each a function of a page size and what else the two above take.
POOLS = {
    "mha": functools.partial(mha_pool, False),
    "mha_fia": functools.partial(mha_pool, True),
    "mla": functools.partial(mla_pool, False),
    "mla_index_keys": functools.partial(mla_pool, True),
}


def kv_buffer_infos(pool) -> tuple[list[int], list[int], list[int]]:
    """Returns the pointers, bytes, and bytes per page of a pool's registered KV buffers."""
    infos = getattr(utils, "get_kv_transfer_buf_infos", None)  # since 0.5.23
    return pool.get_contiguous_buf_infos() if infos is None else infos(pool)


def pages(buffers, page_size: int) -> list[list[int]]:
    """Returns the page addresses of each buffer, from the tensors themselves."""
    tokens = [buffer.reshape(-1, *buffer.shape[-2:]) for buffer in buffers]
    return [
        [layer[at].data_ptr() for at in range(0, layer.shape[0], page_size)] for layer in tokens
    ]


def reported_pages(infos) -> list[list[int]]:
    """Returns the page addresses of each buffer according to the pool's buffer infos.

    `infos` are the lists of the buffers' pointers, bytes, and bytes per page.
    """
    return [list(range(pointer, pointer + length, item)) for pointer, length, item in zip(*infos)]


def fia_pages(fia: bool, page_size: int, start_layer: int) -> bool:
    """Returns whether the pool reports the right address of each K and V page."""
    pool = mha_pool(fia, page_size, start_layer)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    return reported_pages(pool.get_contiguous_buf_infos()) == pages(buffers, page_size)


def _manager(kind: type, start_layer: int, **more) -> object:
    manager = kind.__new__(kind)
    manager.kv_args = SimpleNamespace(prefill_start_layer=start_layer, **more)
    return manager


def mha_pairs(sizes: list[int], stage: int, decode_drafts: int) -> list[list]:
    """Returns [prefill's, decode's] pointer of each pair of MHA buffers.

    Pointers are numbers; decode's are prefill's plus 1000.

    Args:
        sizes: Layers of each prefill stage.
        stage: The prefill rank's stage.
        decode_drafts: Draft layers on decode.
    """
    total, start = sum(sizes), sum(sizes[:stage])
    layers = range(start, start + sizes[stage])
    src = [*layers, *(100 + n for n in layers)]
    dst = [*range(1000, 1000 + total), *range(1100, 1100 + total)]
    dst += [1200 + n for n in range(2 * decode_drafts)]
    manager = _manager(MooncakeKVManager, start, total_kv_layers=total)
    src_k, src_v, dst_k, dst_v, count = manager.get_mha_kv_ptrs_with_pp(src, dst)
    assert count == len(src_k) == len(src_v)
    return [list(pair) for pair in zip([*src_k, *src_v], [*dst_k, *dst_v])]


def mla_pairs(sizes: list[int], stage: int, groups: int, drafts: list[int]) -> list[list]:
    """Returns [prefill's, decode's] pointer of each pair of MLA buffers; see `mha_pairs`.

    Args:
        groups: Buffers per layer.
        drafts: Draft layers on prefill's last stage, and on decode.
    """
    total, start = sum(sizes), sum(sizes[:stage])

    def pointers(layers, draft_layers: int) -> list[int]:
        numbers = [*layers], [90 + n for n in range(draft_layers)]
        return [100 * group + n for part in numbers for group in range(groups) for n in part]

    own_drafts = drafts[0] if stage == len(sizes) - 1 else 0
    src = pointers(range(start, start + sizes[stage]), own_drafts)
    dst = [1000 + pointer for pointer in pointers(range(total), drafts[1])]
    manager = _manager(AscendKVManager, start, kv_buf_groups=groups, total_kv_layers=total)
    got_src, got_dst, count = manager.get_mla_kv_ptrs_with_pp(src, dst)
    assert count == len(got_src)
    return [list(pair) for pair in zip(got_src, got_dst)]


def _any_name(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return object


def import_mori() -> ModuleType:
    """Imports the engine's module for Mori; a stub of AMD's library provides names only."""
    names_only = {}
    for name in ("mori", "mori.cpp", "mori.io"):
        names_only[name] = ModuleType(name)
        names_only[name].__getattr__ = _any_name
    with mock.patch.dict(sys.modules, names_only):  # other code must not find it
        return importlib.import_module("sglang.srt.disaggregation.mori.conn")


def mori_pairs(layers: int, decode_drafts: int) -> list[list]:
    """Returns pairs like `mha_pairs`, of Mori's memory descriptors, for one stage."""
    manager = _manager(import_mori().MoriKVManager, 0, total_kv_layers=layers)
    manager.kv_mem_descs = [f"{part} {n}" for part in "kv" for n in range(layers)]
    dst = manager.kv_mem_descs + [
        f"draft {part} {n}" for part in "kv" for n in range(decode_drafts)
    ]
    src_k, src_v, dst_k, dst_v, _ = manager._get_mha_mem_desc_slices(dst)
    return [list(pair) for pair in zip([*src_k, *src_v], [*dst_k, *dst_v])]


class RefusingEngine:
    """Stands in for MemFabric's and Mooncake's registration; refuses buffers by their lengths.

    A batch with a length in `refused`, or with both lengths in `refused_together`, fails as a
    whole. With `keeps` it behaves like MemFabric 1.1.4 to 1.2.1, which registers in address order
    until it fails, keeps what it has registered, and refuses to register it again.
    """

    def __init__(self, refused: list[int], refused_together: list[int], keeps: bool = False):
        self.refused = set(refused)
        self.refused_together = set(refused_together)
        self.keeps = keeps
        self.batches: list[list[int]] = []
        self.registered: list[int] = []

    def batch_register_memory(self, ptrs: list[int], lengths: list[int]) -> int:
        self.batches.append(list(lengths))
        clash = self.refused_together and self.refused_together <= set(lengths)
        if self.keeps:
            for _, length in sorted(zip(ptrs, lengths)):
                if length in self.refused or length in self.registered:
                    return -1
                self.registered.append(length)
        elif clash or self.refused & set(lengths):
            return -1
        else:
            self.registered += lengths
        return 0


def by_kind(numbers: list[int]) -> list:
    """Wraps the numbers for later releases, which have a list per kind of state."""
    return [numbers] if SINCE_0_5_18 else numbers


def registration(
    backend: str,
    refused: list[int],
    refused_together: list[int] = (),
    environment: dict | None = None,
    state_is_described: bool = True,
    state_bytes: int = 40,
    addresses: list[int] = (1 << 21, 2 << 21, 3 << 21, 4 << 21),
    keeps: bool = False,
    packing_bytes: int = 0,
) -> dict:
    """Registers a rank's buffers with a `RefusingEngine`.

    KV buffers have 10 and 20 bytes, aux 30; `addresses` are those of KV, aux and state. With
    `packing_bytes`, the rank also has a packing buffer, behind these.

    Returns:
        `batches` of lengths, `registered` lengths, the `error`, which may be empty, and whether the
        rank `packs`.
    """
    kind = {"ascend": AscendKVManager, "mooncake": MooncakeKVManager}[backend]
    named = [SimpleNamespace(name=f"{component}, layer 3") for component in ("k", "v")]
    state = [SimpleNamespace(name="index_k, layer 3")] if state_is_described else []
    manager = _manager(
        kind,
        0,
        kv_data_ptrs=list(addresses[:2]),
        kv_data_lens=[10, 20],
        aux_data_ptrs=[addresses[2]],
        aux_data_lens=[30],
        state_data_ptrs=by_kind([addresses[3]]),
        state_data_lens=by_kind([state_bytes]),
        layout=SimpleNamespace(kv=named, state=state),
    )
    manager.disaggregation_mode = DisaggregationMode.DECODE  # which packs nothing
    if packing_bytes:
        region = ("packing buffer", 9 << 21, packing_bytes)
        manager.kv_args.packing = SimpleNamespace(region=region)
    refusing = RefusingEngine(refused, refused_together, keeps)
    manager.engine = object.__new__(AscendTransferEngine)
    manager.engine.engine = refusing
    error = ""
    try:
        with mock.patch.dict(os.environ, environment or {}):
            manager.register_buffer_to_engine()
    except RuntimeError as raised:
        error = str(raised)
    return {
        "batches": refusing.batches,
        "registered": sorted(refusing.registered),
        "error": error,
        "packs": getattr(manager.kv_args, "packing", None) is not None,
    }


def copy_by_token(kind: str, page_size: int) -> bool:
    """Returns whether a copy of 1.5 pages to the host and back restores all slots."""
    pool = mla_pool(False, page_size) if kind == "mla" else mha_pool(kind == "fia", page_size)
    keys = [layer.view(-1, layer.shape[-1] * layer.shape[-2]) for layer in pool.k_buffer]
    for layer in keys:
        layer.copy_(torch.arange(layer.numel(), dtype=layer.dtype).view(layer.shape))
    slots = torch.arange(page_size, page_size * 5 // 2)
    before = [layer[slots].clone() for layer in keys]
    copied = pool.get_cpu_copy(slots)
    for layer in keys:
        layer.zero_()
    pool.load_cpu_copy(copied, slots)
    return all(torch.equal(layer[slots], kept) for layer, kept in zip(keys, before))


def npu_move(kind: str, native: bool, target: int, source: int) -> list[int]:
    """Moves a token in a pool with 16-token pages; returns the slots that change."""
    pool = mla_pool(False, 16) if kind == "mla" else mha_pool(kind == "fia", 16)
    pool.use_native_move_kv_cache = native
    first = pool.k_buffer[0].view(pool.size + pool.page_size, -1)
    first.copy_(torch.arange(first.numel(), dtype=first.dtype).view(first.shape))
    before = first.clone()
    pool.move_kv_cache(torch.tensor([target]), torch.tensor([source]))
    return (first != before).any(1).nonzero().flatten().tolist()


def imports_torch_npu_unconditionally() -> bool:
    """Returns whether the NPU pools' module imports torch_npu unconditionally."""
    module = inspect.getmodule(NPUMHATokenToKVPool)
    return "\nimport torch_npu\n" in inspect.getsource(module)


if __name__ == "__main__":
    answers = []
    for call in json.loads(sys.argv[1]):
        name, *arguments = call
        try:
            answers.append(globals()[name](*arguments))
        except Exception as error:
            answers.append({"raised": f"{type(error).__name__}: {error}"})
    print("\n" + json.dumps(answers), flush=True)
    os._exit(0)  # a regular exit may crash in gloo's threads
