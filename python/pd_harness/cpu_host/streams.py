"""Streams and events of a machine on which everything is synchronous."""


def _nothing(self, *args, **kwargs) -> None:
    """Return at once: no work is ever pending."""


class NoEvent:
    """``torch.cuda.Event`` without asynchrony: every event has already happened."""

    __init__ = record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True


class NoStream:
    """``torch.cuda.Stream`` without asynchrony."""

    __init__ = __exit__ = wait_stream = wait_event = synchronize = _nothing

    def __enter__(self):
        return self
