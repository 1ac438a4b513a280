"""KV managers without a transfer library, and the prefill server that decode queries."""

import copy
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.kv_layout import TransferStatus
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, MooncakeKVReceiver
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver
from sglang.srt.disaggregation.pd import prefill_servers
from sglang.srt.disaggregation.utils import DisaggregationMode

from pd_harness.polling import wait_until

MANAGERS = {"mooncake": MooncakeKVManager, "nixl": NixlKVManager}
RECEIVERS = {MooncakeKVManager: MooncakeKVReceiver, NixlKVManager: NixlKVReceiver}


def _make_manager(kind: type, role: DisaggregationMode, **attributes):
    manager = kind.__new__(kind)
    vars(manager).update(
        disaggregation_mode=role,
        request_status={},
        attn_tp_rank=0,
        attn_tp_size=1,
        pp_rank=0,
        pp_size=1,
        **attributes,
    )
    return manager


@pytest.fixture
def make_prefill():
    """A function that makes a prefill rank's manager of a class, with some more attributes."""

    def make(kind: type, **more):
        rooms = {"transfer_infos": {}, "decode_kv_args_table": {}, "bootstrap_timeout": 100}
        return _make_manager(kind, DisaggregationMode.PREFILL, **rooms, **more)

    return make


@pytest.fixture(params=MANAGERS)
def decode(request):
    """A decode rank's manager."""
    return make_decode(request.param)


def make_decode(backend: str):
    """Returns a decode rank's manager."""
    return _make_manager(
        MANAGERS[backend],
        DisaggregationMode.DECODE,
        kv_args=SimpleNamespace(page_size=16, engine_rank=0, verifier=None, gpu_id=0),
        is_mla_backend=False,
        connection_pool={},
        connection_lock=threading.Lock(),
        addr_to_rooms_tracker=defaultdict(set),
        required_prefill_response_num_table={},
        prefill_response_tracker=defaultdict(set),
        transfer_statuses=defaultdict(TransferStatus),
        requested_rooms=set(),
        arrived_units=defaultdict(dict),
        failing_rooms=set(),
        agent=SimpleNamespace(name="decode", get_new_notifs=dict),
        engine=SimpleNamespace(get_session_id=lambda: "127.0.0.1:1"),
        waiting_timeout=100,
        heartbeat_interval=100,
        max_failures=2,
        local_ip="127.0.0.1",
        rank_port=1,
    )


class FakePrefillServer:
    """A prefill server with one rank: its bootstrap server, and the rank's socket.

    Attributes:
        sizes, rank: The bootstrap server's answers, or exceptions instead.
        queried_ranks: What was queried: numbers of ranks, or -1 for the sizes.
        open: Lets answers through.
    """

    address = "127.0.0.1:8998"

    def __init__(self, listen):
        self._listen, self.queried_ranks = listen, []
        self.sizes = {
            "prefill_attn_tp_size": 1,
            "prefill_dp_size": 1,
            "prefill_pp_size": 1,
            "prefill_page_size": 16,
            "takes_aborts": True,
        }
        self.open = threading.Event()
        self.open.set()
        self.move_rank()

    def move_rank(self) -> None:
        """Has the rank listen on another port, as another process would."""
        self.sock, port = self._listen()
        self.rank = {"rank_ip": "127.0.0.1", "rank_port": port}

    def close_rank(self) -> None:
        self.sock.close(linger=0)

    def read(self) -> list[bytes]:
        """The next message to the rank."""
        return self.sock.recv_multipart()

    def get(self, url: str, params: dict, timeout) -> SimpleNamespace:
        """Stands in for `requests.get`."""
        self.queried_ranks.append(params["engine_rank"])
        assert self.open.wait(10)
        answer = self.sizes if params["engine_rank"] == -1 else self.rank
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=200, text="", json=lambda: copy.copy(answer))


@pytest.fixture
def another_decode(decode):
    """The manager of another rank of the same decode server."""
    (backend,) = (name for name, kind in MANAGERS.items() if isinstance(decode, kind))
    return make_decode(backend)


@pytest.fixture
def server(listen, monkeypatch):
    """The prefill server that decode queries."""
    fake = FakePrefillServer(listen)
    monkeypatch.setattr(prefill_servers.requests, "get", fake.get)
    return fake


@pytest.fixture
def make_receiver(decode, server):
    """A function that makes a room's receiver, which registers by a short message."""

    class Registering(RECEIVERS[type(decode)]):
        def _register_kv_args(self):
            self._register([b"registers"])

    def make(room: int, address: str = server.address, at=decode):
        return Registering(at, address, room)

    return make


@pytest.fixture
def locate(decode, make_receiver):
    """A function that makes a room's receiver, and waits until it knows prefill's ranks."""

    def make(room: int, at=decode):
        made = make_receiver(room, at=at)
        assert wait_until(lambda: made.poll() == KVPoll.WaitingForInput, 10)
        return made

    return make
