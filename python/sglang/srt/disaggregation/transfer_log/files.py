"""Writes series where the engine's `/metrics` reads those of all its processes.

The engine uses `prometheus_client` in multi-process mode: each process has a file for each kind of
metric in the folder that `PROMETHEUS_MULTIPROC_DIR` names, and `/metrics` adds them up. The
library's own metrics never drop a series, and map their files into memory, which ends the process
when the disk is full. Ours are written anew as a whole, and renamed, so that no reader waits.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Dict, List, Tuple

from .series import Labels, Metric, Series, sample_names

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SWITCH = "SGLANG_PD_METRICS"  # 0: the engine's own metrics alone
_SUM, _LARGEST = "gauge_livesum", "gauge_livemax"
_PREFIXES = ("counter", "histogram", _SUM, _LARGEST)
# Series whose samples' names are remembered; a server has fewer.
MAX_SERIES = 1 << 14
# A value, and when it was set, which only other gauges need.
_NUMBER = struct.Struct("dd")


def metrics_folder() -> str:
    """Returns the folder of the engine's metrics; empty without any, or if ours are off."""
    return "" if os.environ.get(SWITCH) == "0" else os.environ.get(VARIABLE, "")


class SeriesFiles:
    """A rank's files, one for each kind of metric."""

    def __init__(self, folder: Path, owner: str):
        """owner: Unique in the folder; without `_`, at which the library splits names."""
        self.folder, self.owner = folder, owner
        # As the library encodes them; to do that for each write would hold up the scheduler.
        self._names: Dict[Tuple[Metric, Labels], List[bytes]] = {}
        self._written: Dict[str, bytes] = {}

    def write(self, series: Series) -> None:
        """Replaces the files whose values have changed, also by one without samples.

        Raises:
            OSError: The folder is gone or full; a file is as it was, or as it is to be.
        """
        files: Dict[str, List[bytes]] = {prefix: [] for prefix in _PREFIXES}
        for metric, labels, numbers in series.numbers():
            samples = files[_prefix(metric)]
            for name, number in zip(self._names_of(metric, labels), numbers):
                samples += (name, _NUMBER.pack(number, 0.0))
        for prefix, samples in files.items():
            # Used bytes, padding, samples: `prometheus_client.mmap_dict`.
            body = b"".join(samples)
            whole = struct.pack("ii", 8 + len(body), 0) + body
            if whole != self._written.get(prefix):
                self._replace(self.folder / f"{prefix}_{self.owner}.db", whole)
                self._written[prefix] = whole

    def _replace(self, path: Path, whole: bytes) -> None:
        unfinished = path.with_suffix(".new")
        try:
            unfinished.write_bytes(whole)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _names_of(self, metric: Metric, labels: Labels) -> List[bytes]:
        known = self._names.get((metric, labels))
        if known is None:
            if len(self._names) >= MAX_SERIES:
                self._names.clear()
            known = [_encoded(metric, *sample) for sample in sample_names(metric, labels)]
            self._names[metric, labels] = known
        return known


def _prefix(metric: Metric) -> str:
    if metric.kind != "gauge":
        return metric.kind
    return _LARGEST if metric.is_of_server else _SUM


def _encoded(metric: Metric, name: str, labels: Dict[str, str]) -> bytes:
    # Not at the top: imported before the variable is set, the library would keep no files.
    from prometheus_client.mmap_dict import mmap_key

    text = mmap_key(metric.name, name, list(labels), list(labels.values()), metric.help)
    encoded = text.encode()
    return struct.pack("i", len(encoded)) + encoded + b" " * (8 - (len(encoded) + 4) % 8)
