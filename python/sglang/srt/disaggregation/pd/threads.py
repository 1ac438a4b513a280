"""Starts threads; a system without threads must not end a server."""

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def start_thread(act: Callable[..., None], *args) -> bool:
    """Runs `act` in its own thread; returns False, without raising, if no thread can start."""
    try:
        threading.Thread(target=act, args=args, daemon=True).start()
        return True
    except RuntimeError as error:
        logger.warning(f"Could not start a thread for {act.__name__}: {error}")
        return False
