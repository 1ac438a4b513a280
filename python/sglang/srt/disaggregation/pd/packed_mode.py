"""Whether head slices are sent as whole rows, and how much memory prefill has to pack them."""

import os

from sglang.srt.disaggregation.pd.environment import number_of

VARIABLE = "SGLANG_PD_PACKED"
# NZ tiles: a token's bytes do not lie together in its page, so that it has no row.
TILED_VARIABLE = "SGLANG_USE_FIA_NZ"
MEMORY_VARIABLE = "SGLANG_PD_PACKING_MIB"
MEMORY_MIB = 128


def is_packed_mode() -> bool:
    """Returns whether this rank sends and reads head slices as whole rows.

    Raises:
        ValueError: The variable has an unknown value; the server must not start.
    """
    value = os.environ.get(VARIABLE, "") or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}; expected 1 or 0")
    return value == "1" and os.environ.get(TILED_VARIABLE, "").lower() not in ("1", "true")


def read_packing_bytes() -> int:
    """Returns how many bytes a prefill rank sets aside to pack rows; 0 for none.

    Raises:
        ValueError: The variable is not a number of at least 0; the server must not start.
    """
    return int(number_of(MEMORY_VARIABLE, MEMORY_MIB, 0.0, "MiB")) << 20
