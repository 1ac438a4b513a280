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

from .series import Metric, Series

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_SUM, _LARGEST = "gauge_livesum", "gauge_livemax"
_PREFIXES = ("counter", "histogram", _SUM, _LARGEST)
MAX_KEYS = 1 << 16

_Key = Tuple[Metric, str, Tuple[str, ...]]


def metrics_folder() -> str:
    """Returns the folder of the engine's metrics; empty without `--enable-metrics`."""
    return os.environ.get(VARIABLE, "")


class SeriesFiles:
    """A rank's files, one for each kind of metric."""

    def __init__(self, folder: Path, owner: str):
        """owner: Unique in the folder; without `_`, at which the library splits names."""
        self.folder, self.owner = folder, owner
        self._keys: Dict[_Key, bytes] = {}  # as the library encodes them
        self._written: Dict[str, bytes] = {}

    def write(self, series: Series) -> None:
        """Replaces the files whose values have changed, also by one without samples.

        Raises:
            OSError: The folder is gone or full; a file is as it was, or as it is to be.
        """
        files: Dict[str, List[bytes]] = {prefix: [] for prefix in _PREFIXES}
        for metric, name, labels, value in series.samples():
            prefix = metric.kind
            if prefix == "gauge":
                prefix = _LARGEST if metric.is_of_server else _SUM
            # A value, and when it was set, which only other gauges need.
            sample = self._key(metric, name, labels) + struct.pack("dd", value, 0.0)
            files[prefix].append(sample)
        for prefix, samples in files.items():
            # Used bytes, padding, samples: `prometheus_client.mmap_dict`.
            whole = struct.pack("ii", 8 + sum(map(len, samples)), 0) + b"".join(samples)
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

    def _key(self, metric: Metric, name: str, labels: Dict[str, str]) -> bytes:
        key = (metric, name, tuple(labels.values()))
        known = self._keys.get(key)
        if known is None:
            # Not at the top: imported before the variable is set, the library would keep no files.
            from prometheus_client.mmap_dict import mmap_key

            text = mmap_key(metric.name, name, list(labels), list(labels.values()), metric.help)
            encoded = text.encode()
            padded = encoded + b" " * (8 - (len(encoded) + 4) % 8)
            if len(self._keys) >= MAX_KEYS:
                self._keys.clear()
            known = self._keys[key] = struct.pack("i", len(encoded)) + padded
        return known
