"""Let test files import what they share; pytest's importlib mode leaves that to us."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE / "serving"), str(HERE / "support")]
