"""The draft's KV heads come from the draft model, even if its worker delegates to the target."""

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.pd.local_layout import _draft_kv_heads
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

pytestmark = pytest.mark.engine

TARGET, DRAFT = 4, 8


def model(kv_heads: int, algorithm: str = "") -> SimpleNamespace:
    """A worker with a model runner."""
    config = SimpleNamespace(get_total_num_kv_heads=lambda: kv_heads)
    runner = SimpleNamespace(model_config=config)
    if algorithm:
        runner.spec_algorithm = SpeculativeAlgorithm.from_string(algorithm)
    return SimpleNamespace(model_runner=runner, draft_runners=[runner], model_config=config)


WORKERS = {
    "DFLASH": (DFlashWorkerV2, DRAFT),
    "EAGLE": (EAGLEWorkerV2, DRAFT),
    "NGRAM": (NGRAMWorker, None),
}


@pytest.mark.parametrize("algorithm", WORKERS)
def test_draft_heads_of_engine_workers(algorithm):
    kind, expected = WORKERS[algorithm]
    worker = kind.__new__(kind)
    worker._target_worker = model(TARGET, algorithm)
    worker._draft_worker = model(DRAFT)
    assert _draft_kv_heads(SimpleNamespace(draft_worker=worker)) == expected


@pytest.mark.parametrize(
    "worker",
    [None, SimpleNamespace(), model(TARGET), SimpleNamespace(_draft_model_runners=lambda: ())],
    ids=["none", "unknown", "no draft runners", "no draft model"],
)
def test_draft_heads_are_unknown_without_a_draft_model(worker):
    assert _draft_kv_heads(SimpleNamespace(draft_worker=worker)) is None


def test_draft_heads_of_a_worker_that_delegates_to_the_target():
    """The worker's `model_config` is the target's."""

    class Worker:
        target = model(TARGET)

        def __getattr__(self, name: str):
            return getattr(self.target, name)

        def _draft_model_runners(self):
            return tuple(model(DRAFT).draft_runners)

    worker = Worker()
    assert worker.model_config.get_total_num_kv_heads() == TARGET
    assert _draft_kv_heads(SimpleNamespace(draft_worker=worker)) == DRAFT
