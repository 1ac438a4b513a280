"""Writes series where the engine's `/metrics` reads those of all its processes.

The engine uses `prometheus_client` in multi-process mode: each process has a file for each kind of
metric in the folder that `PROMETHEUS_MULTIPROC_DIR` names, and `/metrics` adds them up. The
library's own metrics never drop a series, and its files are written where values change; ours are
written anew as a whole, which drops what is no longer there, and renamed, so that no reader waits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Tuple

from .series import Series

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# The live processes' gauges are added up.
_PREFIXES = {"counter": "counter", "histogram": "histogram", "gauge": "gauge_livesum"}


def metrics_folder() -> str:
    """Returns the folder of the engine's metrics; empty without `--enable-metrics`."""
    return os.environ.get(VARIABLE, "")


def write_series(folder: Path, owner: str, series: Series) -> None:
    """Replaces an owner's files, one for each kind, also one without samples.

    Args:
        owner: Unique in the folder; without `_`, at which the library splits names.

    Raises:
        OSError: The folder is gone or full; the files are as they were, or one kind is newer.
    """
    # Not at the top: imported before the variable is set, the library would not write files.
    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    by_kind: Dict[str, List[Tuple[str, float]]] = {kind: [] for kind in _PREFIXES}
    for metric, name, labels, value in series.samples():
        key = mmap_key(metric.name, name, list(labels), list(labels.values()), metric.help)
        by_kind[metric.kind].append((key, value))
    for kind, samples in by_kind.items():
        path = folder / f"{_PREFIXES[kind]}_{owner}.db"
        unfinished = path.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        file = MmapedDict(str(unfinished))
        try:
            for key, value in samples:
                file.write_value(key, value, 0.0)
        finally:
            file.close()
        unfinished.replace(path)
