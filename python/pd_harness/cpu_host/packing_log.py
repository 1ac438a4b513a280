"""Log that KV heads are packed or interleaved, which the patch set does not log; slow the latter.

Slices bring the same bytes, so the answers do not show how these were sent.
"""

import functools
import logging
import os
import time
from types import ModuleType

from pd_harness.cpu_host.import_hooks import on_import_of

PACKED_LOG_LINE = "First KV heads packed"  # in prefill's log
INTERLEAVED_LOG_LINE = "First KV heads interleaved"  # in decode's log
# Seconds that decode waits after it has interleaved one buffer of a block.
PAUSE_VARIABLE = "SGLANG_PD_CPU_INTERLEAVING_PAUSE"


@on_import_of("sglang.srt.disaggregation.pd.packing")
def log_packing(packing: ModuleType) -> None:
    """Log the first time that a rank packs."""
    packing.pack = _logged_once(packing.pack, PACKED_LOG_LINE)


@on_import_of("sglang.srt.disaggregation.pd.interleaving")
def log_interleaving(interleaving: ModuleType) -> None:
    """Log the first time that a rank interleaves."""
    interleave = _logged_once(interleaving.interleave, INTERLEAVED_LOG_LINE)
    pause = float(os.environ.get(PAUSE_VARIABLE, 0))

    def interleave_slowly(*given) -> None:
        interleave(*given)
        time.sleep(pause)

    interleaving.interleave = interleave_slowly if pause else interleave


def _logged_once(act, line: str):
    log = functools.cache(logging.getLogger(__name__).info)

    @functools.wraps(act)
    def logged(*given, **named) -> None:
        act(*given, **named)
        log(line)

    return logged
