"""The tool's refusals and their exit codes."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes. 0 is success, and `applied` for `status`; 2 is an invalid command line."""

    NO_ENGINE = 3
    UNSUPPORTED = 4
    DRIFTED = 5
    EDITED = 6
    NO_PERMISSION = 7
    BUSY = 8
    IO = 9
    ABSENT = 10
    HALF_APPLIED = 11
    OUTDATED = 12
    PATCH_SET = 13
    MISMATCH = 14
    NOT_VERIFYING = 15
    PREVIEW = 16
    HOST_PROBLEM = 17
    NO_MODEL = 18
    INCOMPATIBLE = 19
    NO_PICTURE = 20
    NO_REQUEST = 21


class Refusal(Exception):
    """Stops the command; the text names the cause and the remedy.

    Leaves the engine as it was, or, if a write failed, without any edits.
    """

    def __init__(self, code: ExitCode, text: str):
        super().__init__(text)
        self.code = code
