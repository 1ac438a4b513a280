"""MemFabric registers a rank's pools in one batch, and copies them between processes."""

import ctypes
import functools
from types import SimpleNamespace

import pytest
from engine_release import SINCE_0_5_18

pytestmark = pytest.mark.npu

# MemFabric rounds registered memory to 2 MiB pages. With 61 small layers, dozens of buffers share
# such a page; with large layers, each layer has several pages.
SMALL = {"layers": 61, "page_size": 2}
LARGE = {"layers": 2, "page_size": 128, "pages": 60, "k_width": 64, "v_width": 8}
MODELS = {
    "mla_small": {"mla": True, **SMALL},
    "mla_index_keys_small": {"mla": True, "index_keys": True, **SMALL},
    "mla_large": {"mla": True, **LARGE},
    "paged_large": LARGE,
    "fia_small": {"fia": True, **SMALL},
    "fia_large": {"fia": True, **LARGE},
}
# In later releases, metadata buffers can also hold sampling-mask tokens.
METADATA = {"max_sampling_mask_tokens": 0} if SINCE_0_5_18 else {}
REQUESTS = [
    ([3], [5], None),
    ([1, 2, 3, 4], [4, 5, 6, 7], None),
    ([2, 3, 8, 5, 6, 11], [10, 9, 3, 4, 5, 0], [2, 1, 3]),
]


@pytest.fixture(scope="module")
def fork_server():
    """A function that returns the process that makes ranks; the first call starts it."""
    import fleet

    return functools.cache(lambda: fleet.ForkServer("patched"))


@pytest.mark.parametrize("name", MODELS)
def test_pools_transfer_between_processes(fork_server, name):
    """Compares every byte of the decode rank's pools; each rank has its own NPU."""
    import fleet

    model = fleet.Fleet(backend="ascend", **MODELS[name])
    with fleet.running(model, fork_server(), fork_server()) as servers:
        for src, dst, chunks in REQUESTS:
            outcome = servers.request(src, dst, chunks)
            assert outcome.state == "right", (src, dst, chunks, outcome)


class RecordingEngine:
    """Wraps MemFabric's engine, and records the batches that it registers."""

    def __init__(self, engine):
        self.engine = engine
        self.batches: list[list[int]] = []

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        self.batches.append(lengths)
        return self.engine.batch_register_memory(addresses, lengths)


def keep_for_ever(library) -> None:
    """Keeps MemFabric's engine until the process exits, as a server does.

    One that ends before crashes the process once in fifty times.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(library))


def test_rank_registers_in_one_batch(engine_calls, monkeypatch):
    import torch
    from memfabric_hybrid import create_config_store
    from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers

    from pd_harness.ports import HOST, free_ports

    (port,) = free_ports(1)
    monkeypatch.setenv("ASCEND_MF_STORE_URL", f"tcp://{HOST}:{port}")
    create_config_store(f"tcp://{HOST}:{port}")
    # The pools must outlive their registration.
    pool = engine_calls.mla_pool(True, 16, layers=7)
    metadata = MetadataBuffers(8, 16, torch.float32, **METADATA)
    kv, aux = pool.get_contiguous_buf_infos(), metadata.get_buf_infos()
    engine = engine_calls.AscendTransferEngine(HOST, 0, DisaggregationMode.PREFILL)
    keep_for_ever(engine.engine)
    engine.engine = recording = RecordingEngine(engine.engine)
    manager = engine_calls.AscendKVManager.__new__(engine_calls.AscendKVManager)
    manager.engine = engine
    manager.disaggregation_mode = DisaggregationMode.DECODE  # which packs nothing
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=kv[0],
        kv_data_lens=kv[1],
        aux_data_ptrs=aux[0],
        aux_data_lens=aux[1],
        state_data_ptrs=[],
        state_data_lens=[],
        layout=SimpleNamespace(kv=[SimpleNamespace(name=hex(p)) for p in kv[0]], state=[]),
    )
    manager.register_buffer_to_engine()  # raises if MemFabric refuses
    assert recording.batches == [[*kv[1], *aux[1]]]
