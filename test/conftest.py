"""Let test files import the helpers beside them; pytest's importlib mode leaves that to us."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "serving"))
