"""`kv_layout` alone, found in the patch tree: no engine, no torch."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python" / "sglang" / "srt" / "disaggregation")]
