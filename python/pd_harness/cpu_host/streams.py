"""Streams and events of a machine on which everything is synchronous."""


class NoEvent:
    """``torch.cuda.Event`` without asynchrony: every event has already happened."""

    def __init__(self, *args, **kwargs):
        self.recorded_on = None

    def record(self, stream=None) -> None:
        self.recorded_on = stream

    def wait(self, stream=None) -> None:
        """Return at once: no work is ever pending."""

    def synchronize(self) -> None:
        """Return at once: no work is ever pending."""

    def query(self) -> bool:
        return True


class NoStream:
    """``torch.cuda.Stream`` without asynchrony."""

    def __init__(self, *args, **kwargs):
        """Ignore priority and device."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return False

    def wait_stream(self, stream) -> None:
        """Return at once: no work is ever pending."""

    def wait_event(self, event) -> None:
        """Return at once: no work is ever pending."""

    def synchronize(self) -> None:
        """Return at once: no work is ever pending."""
