"""Session ids of transfer engines, which address decode ranks.

HOST:PORT        Mooncake, and most releases of MemFabric
HOST:PORT_PID    MemFabric 1.0.5 to 1.1.2
HOST:0           MemFabric from 1.1.3 on before it has a port; stock 0.5.9 sends this to peers
"""

from __future__ import annotations

import re

# Looser than these three forms: a stricter pattern could drop ids that work in the engine.
SESSION_ID = re.compile(r"(?P<host>.+):(?P<port>[0-9]+)(_[0-9]+)?")


def port_of(session_id: str) -> int:
    """Returns the port in a session id; 0 if its transfer engine had none yet.

    Raises:
        ValueError: The session id is invalid.
    """
    found = SESSION_ID.fullmatch(session_id)
    if found is None:
        raise ValueError(f"invalid session id {session_id[:300]!r}, expected HOST:PORT")
    return int(found["port"])


def unreachable_reason(session_id: str) -> str:
    """Returns why nothing can be written to a decode rank with this session id; "" if it can.

    Raises:
        ValueError: The session id is invalid.
    """
    if port_of(session_id) != 0:
        return ""
    return (
        f"decode's session id is {session_id}, which has no port: its transfer engine had not "
        "chosen one when SGLang read it (0.5.9 with memfabric-hybrid 1.1.3 or later); run "
        "`sglang-pd apply` there, too, or install memfabric-hybrid 1.1.2 or earlier there"
    )
