"""Streams and events of a machine on which everything is synchronous."""


class NoEvent:
    """``torch.cuda.Event`` where everything is synchronous: always recorded, always reached."""

    def __init__(self, *args, **kwargs):
        self.recorded_on = None

    def record(self, stream=None) -> None:
        self.recorded_on = stream

    def wait(self, stream=None) -> None:
        """Nothing is ever outstanding."""

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def query(self) -> bool:
        return True


class NoStream:
    """``torch.cuda.Stream`` where everything is synchronous."""

    def __init__(self, *args, **kwargs):
        """Priority and device make no difference."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return False

    def wait_stream(self, stream) -> None:
        """Nothing is ever outstanding."""

    def wait_event(self, event) -> None:
        """Nothing is ever outstanding."""

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""
