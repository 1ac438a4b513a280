"""Whether KV is compared after each transfer, and what happens to a request that differs."""

import os

VARIABLE = "SGLANG_PD_VERIFY"
MODES = {"": "", "0": "", "1": "fail", "log": "log"}


def verify_mode() -> str:
    """Returns `fail`, `log`, or "" if nothing is to be compared.

    Raises:
        ValueError: The variable has another value; the server must not start.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in MODES:
        raise ValueError(f"{VARIABLE} is {value!r}; expected 1, log, or 0")
    return MODES[value]
