"""A decode rank's session id has the port of MemFabric's listener, whenever it is chosen."""

from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.ascend import transfer_engine
from sglang.srt.disaggregation.utils import DisaggregationMode

pytestmark = pytest.mark.engine


def session_ids(monkeypatch, before, after) -> tuple[str, str]:
    """The session id that MemFabric is initialised with, and the one that peers get.

    Args:
        before, after: MemFabric's port before and after it is initialised.
    """

    class FakeTransferEngine:
        TransDataOpType = SimpleNamespace(SDMA=1, DEVICE_RDMA=8)
        port, initialised_with = before, None

        def get_rpc_port(self):
            return self.port

        def initialize(self, store, session_id, *_):
            self.port, self.initialised_with = after, session_id
            return 0

    monkeypatch.setattr(transfer_engine, "TransferEngine", FakeTransferEngine)
    monkeypatch.setattr(transfer_engine, "import_error", None)
    engine = transfer_engine.AscendTransferEngine("10.0.0.1", 0, DisaggregationMode.DECODE)
    return engine.engine.initialised_with, engine.get_session_id()


def test_session_id_has_the_port_chosen_by_initialize(monkeypatch):
    """As in MemFabric 1.1.3 and later."""
    assert session_ids(monkeypatch, 0, 10322) == ("10.0.0.1:0", "10.0.0.1:10322")


@pytest.mark.parametrize("port", [17217, "17217_10565"])
def test_session_id_keeps_the_port_known_before_initialize(monkeypatch, port):
    """An older MemFabric might return another port when it is called again."""
    assert session_ids(monkeypatch, port, 9) == (f"10.0.0.1:{port}",) * 2
