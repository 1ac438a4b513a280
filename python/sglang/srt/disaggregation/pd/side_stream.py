"""Work on an accelerator beside the forward passes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Streams(threading.local):
    stream = None


_of_thread = _Streams()


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Runs this thread's work in a stream of its own; on exit, after an error too, it is done.

    On a CPU there are no streams: the calling thread computes.
    """
    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    module.set_device(device)
    if _of_thread.stream is None:
        _of_thread.stream = module.Stream()
    try:
        with module.stream(_of_thread.stream):
            yield
    finally:  # the memory may be given to others
        _of_thread.stream.synchronize()
