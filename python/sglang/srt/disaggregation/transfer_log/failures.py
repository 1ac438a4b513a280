"""Which kind of failure a reason tells of, for a label that neither a client nor a peer chooses."""

from __future__ import annotations

import re

ABORTED_BY_CLIENT = "aborted_by_client"
ABORTED_BY_PEER = "aborted_by_peer"
ANOTHER_RANK = "another_rank"
PEER_LOST = "peer_lost"
OTHER = "other"

# The first that fits counts. Texts are the engine's and ours, of all releases; a peer's text, which
# has ours in front, is judged by what it quotes, too.
_PATTERNS = (
    (
        "rejected",
        r"Prefill refused the request|already in use|[Dd]uplicate .*room",
    ),
    (
        ANOTHER_RANK,
        r"[Ff]ailed on another rank|from another rank|another \w+ rank failed"
        # The engine's, of a rank that knows nothing else.
        r"|Decode transfer failed"
        # Another rank of this server aborted, and prefill says so to all.
        r"|Prefill failed: Aborted by decode",
    ),
    ("mismatch", r"KV verification failed|[Cc]orruption detected"),
    (
        PEER_LOST,
        r"has not answered for|was replaced by another process|[Ll]ost connection|Losing connection"
        r"|is not alive|is healthy before|might be dead|Could not fetch|Could not open a socket"
        r"|Could not send a message|could not be reached|Could not query bootstrap server"
        r"|did not return|connection to decode .* was lost|its connection was lost"
        r"|REMOTE_DISCONNECT|to prefill .* failed$",
    ),
    (
        "refused",
        r"cannot serve this decode server|could not register this decode rank"
        r"|the two servers disagree|dp_rank conflict|follow_bootstrap_room|[Pp]age size .*differ"
        r"|(Page size|KV cache dtype|policy) mismatch|neither divides the other|start both servers"
        r"|should be equal|invalid sizes|requires peer",
    ),
    ("timeout", r"[Tt]imed out|[Tt]imeout reached|time-out|within \S+ s"),
    (
        ABORTED_BY_PEER,
        r"Prefill failed: .*[Aa]bort|decode-side abort|Decode aborted|Aborted by decode"
        r"|Aborted on prefill|abort notification for room",
    ),
    (ABORTED_BY_CLIENT, r"[Aa]bort"),
    (
        "transport",
        r"could not send KV|KV could not be sent|Failed to send|write to decode failed|NIXL"
        r"|could not interleave|could not notify decode|confirmed that they stopped|transfer",
    ),
)
KINDS = (*(kind for kind, _ in _PATTERNS), OTHER)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _PATTERNS)


def failure_kind(reason: str) -> str:
    """Returns one of `KINDS` for why a room failed; `another_rank` if no reason is known."""
    if not reason:
        return ANOTHER_RANK
    return next((kind for kind, pattern in _COMPILED if pattern.search(reason)), OTHER)
