"""Lets unit tests import `kv_layout` from the patch tree, without an engine or torch."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python" / "sglang" / "srt" / "disaggregation")]
