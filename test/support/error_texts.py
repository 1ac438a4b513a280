"""Error texts of failed requests, by release."""

from engine_release import IS_0_5_18, SINCE_0_5_18
from rank_faults import INJECTED_ERROR

from pd_harness.releases import release

# Texts of a failed transfer, by (backend, fault of `rank_faults.TransferFaults`).
TRANSFER_FAILURES_0_5_9 = {
    ("mooncake", "status"): "the transfer engine returned -1",
    ("mooncake", "exception"): f"Prefill could not send KV: {INJECTED_ERROR}",
    ("nixl", "status"): "NIXL did not start the transfer",
    ("nixl", "exception"): f"Prefill could not send KV: {INJECTED_ERROR}",
    ("nixl", "late status"): "Prefill's write to decode failed: NIXL reported an error",
    ("nixl", "late exception"): f"Prefill's write to decode failed: {INJECTED_ERROR}",
}
TRANSFER_FAILURES_0_5_23 = {
    ("mooncake", "status"): "Failed to send",
    ("mooncake", "exception"): f"Prefill could not send KV: {INJECTED_ERROR}",
    ("nixl", "status"): "NIXL did not start a transfer",
    ("nixl", "exception"): INJECTED_ERROR,
    ("nixl", "late status"): "NIXL transfer encountered ERR",
}
TRANSFER_FAILURES = TRANSFER_FAILURES_0_5_23 if SINCE_0_5_18 else TRANSFER_FAILURES_0_5_9
# The same for rows that prefill has packed, which threads send in 0.5.9, too.
PACKED_FAILURES = {
    **TRANSFER_FAILURES,
    ("nixl", "exception"): INJECTED_ERROR,
    ("nixl", "late status"): "NIXL reported an error",
}
LOST_PREFILL = f"Lost connection {'with' if SINCE_0_5_18 else 'to'} prefill"
LOST_DECODE = (
    {"mooncake": "Failed to send", "nixl": "NIXL"}
    if SINCE_0_5_18
    else {"mooncake": "Prefill", "nixl": "Prefill"}
)
CONNECTION_CUT = (
    LOST_DECODE if SINCE_0_5_18 else {"mooncake": TRANSFER_FAILURES["mooncake", "status"]}
)
# Decode's text for a request that failed on another of its ranks only, by backend.
OTHER_RANK_FAILED = dict.fromkeys(
    ("nixl", "mooncake", "ascend"),
    "another rank" if SINCE_0_5_18 else "another decode rank failed",
)
if IS_0_5_18:
    OTHER_RANK_FAILED["nixl"] = "NIXL KVReceiver Exception"
ABORTED = "Aborted by AbortReq."
# Prefill's text for a request that decode aborted, by backend. Later releases get no reason from
# decode, and Mooncake's backend of 0.5.23 records none.
DECODE_ABORTED = {
    "0.5.9": dict.fromkeys(("nixl", "mooncake"), ABORTED),
    "0.5.18": dict.fromkeys(("nixl", "mooncake"), "Aborted by decode"),
    "0.5.23": {
        "nixl": "Aborted by decode-side abort notification",
        "mooncake": "the request failed on another rank",
    },
}[release()]
# Decode's text for a request that prefill's scheduler has removed unsent.
REMOVED_UNSENT = "Aborted on prefill" if IS_0_5_18 else ABORTED
# The text if the request reaches prefill after the abort. Later releases do not remember the abort
# and wait until the request times out.
DECODE_ABORTED_EARLY = "timed out" if SINCE_0_5_18 else f"Decode aborted the request: {ABORTED}"
# Texts of a request that timed out on decode: decode's text, and prefill's by backend.
DECODE_TIMED_OUT = (
    "timed out after" if SINCE_0_5_18 else "SGLANG_DISAGGREGATION_WAITING_TIMEOUT sets the limit"
)
DECODE_TIMED_OUT_ON_PREFILL = (
    DECODE_ABORTED if SINCE_0_5_18 else dict.fromkeys(DECODE_ABORTED, DECODE_TIMED_OUT)
)


def says_another_rank_failed(reason: str, backend: str) -> bool:
    """Whether decode's reason is that the request failed on another of its ranks only.

    Prefill of 0.5.18 tells all ranks that one of them has aborted, perhaps before they agree.
    """
    told = "Prefill failed: Aborted by decode"
    return OTHER_RANK_FAILED[backend] in reason or (IS_0_5_18 and told in reason)
