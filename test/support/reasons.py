"""What the end of a request says, by release."""

from of_release import IS_LATER
from rank_faults import ERROR

# Of a transfer that fails, by backend and how it does.
FIRST_FAILING = {
    ("mooncake", "status"): "the transfer engine returned -1",
    ("mooncake", "exception"): f"Prefill could not send KV: {ERROR}",
    ("nixl", "status"): "NIXL did not start the transfer",
    ("nixl", "exception"): f"Prefill could not send KV: {ERROR}",
    ("nixl", "late status"): "Prefill's write to decode failed: NIXL reports an error",
    ("nixl", "late exception"): f"Prefill's write to decode failed: {ERROR}",
}
LATER_FAILING = {
    ("mooncake", "status"): "Failed to send",
    ("mooncake", "exception"): f"Prefill could not send KV: {ERROR}",
    ("nixl", "status"): "NIXL did not start a transfer",
    ("nixl", "exception"): ERROR,
    ("nixl", "late status"): "NIXL transfer encountered ERR",
}
FAILING = LATER_FAILING if IS_LATER else FIRST_FAILING
LOST_PREFILL = "Lost connection with prefill" if IS_LATER else "does not answer any more"
LOST_DECODE = (
    {"mooncake": "Failed to send", "nixl": "NIXL"}
    if IS_LATER
    else {"mooncake": "Prefill", "nixl": "Prefill"}
)
CUT = LOST_DECODE if IS_LATER else {"mooncake": FAILING["mooncake", "status"]}
ELSEWHERE = "another rank" if IS_LATER else "another decode rank failed"
ABORTED = "Aborted by AbortReq."
# Of a request that decode gave up, what prefill says, by backend. Later ones are not told why, and
# Mooncake's notes nothing.
GIVEN_UP = (
    {
        "nixl": "Aborted by decode-side abort notification",
        "mooncake": "unknown reason from another rank",
    }
    if IS_LATER
    else dict.fromkeys(("nixl", "mooncake"), ABORTED)
)
# The same of one that came to prefill only then: later ones do not remember that it was given up,
# and wait until it times out.
GIVEN_UP_BEFORE = "timed out" if IS_LATER else f"Decode gave up this request: {ABORTED}"
# Of a request that decode has waited for too long, on decode and, by backend, on prefill.
TOO_LATE = "timed out after" if IS_LATER else "SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets the limit"
TOO_LATE_ON_PREFILL = GIVEN_UP if IS_LATER else dict.fromkeys(GIVEN_UP, TOO_LATE)
