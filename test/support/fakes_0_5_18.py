"""What `fake_managers` needs for 0.5.18: attributes, and messages that receivers build inline."""

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import numpy as np
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, TransferStatus
from sglang.srt.disaggregation.pd import held_pages
from sglang.srt.disaggregation.pd.back_off import FailedSessions
from sglang.srt.disaggregation.pd.status_messages import STATUS
from sglang.srt.disaggregation.pd.watched_agent import WatchedAgent
from sglang.srt.runtime_context import get_parallel

RANK = {"rank_ip": "127.0.0.1", "rank_port": 1, "is_dummy": False}


@contextlib.contextmanager
def parallel_config():
    """Provides, within the block, the parallel configuration that a server would publish."""
    values = {"dp_size": 1, "enable_dsa_cache_layer_split": False, "enable_dp_attention": False}
    config = SimpleNamespace(_fields=values, **values)
    with mock.patch.object(get_parallel(), "_config", config):
        yield


def complete(manager, backend: str) -> None:
    """Gives a manager what is made by its constructor in this release only."""
    manager.is_complete = True
    if backend == "nixl":
        manager.exceptions, manager.transfer_statuses = {}, defaultdict(TransferStatus)
        manager.transfer_source_rank = 0
    if hasattr(manager, "prefill_response_tracker"):
        manager.prefill_response_tracker = defaultdict(set)
        manager.heartbeat_failures = {}
    if isinstance(manager, MooncakeKVManager):
        manager.failed_sessions = FailedSessions()
    if isinstance(manager, NixlKVManager):
        manager.agent = WatchedAgent(manager.agent, manager)


@contextlib.contextmanager
def recorded_messages():
    """Records, within the block, what receivers send to prefill ranks."""
    sent: list[list[bytes]] = []
    socket = SimpleNamespace(send_multipart=lambda frames: sent.append(list(frames)))
    with mock.patch.object(held_pages, "PeerSocket", SimpleNamespace(to=lambda *place: socket)):
        yield sent


def receiver_of(decode, kind: type, room: int = 0, **info) -> CommonKVReceiver:
    """Makes a receiver whose only prefill rank has this entry."""
    receiver = kind.__new__(kind)
    made = {"kv_mgr": decode, "bootstrap_room": room, "bootstrap_addr": "host:1"}
    made |= {"bootstrap_infos": [{**RANK, **info}], "required_dst_info_num": 1}
    made |= {"conclude_state": None, "init_time": None, "abort_notified": False}
    if hasattr(decode, "engine"):
        made["session_id"] = decode.engine.get_session_id()
    for name, value in made.items():
        setattr(receiver, name, value)
    return receiver


def note_reader(prefill, decode) -> None:
    """Notes that a decode rank reads `pd.status_messages`, unless it has registered."""
    registered = {(one.endpoint, one.dst_port) for one in prefill.decode_kv_args_table.values()}
    endpoint = (decode.local_ip, decode.rank_port)
    if hasattr(prefill, "status_readers") and endpoint not in registered:
        prefill.status_readers.add(endpoint)


def registration_message(decode, kind: type, is_described: bool) -> list[bytes]:
    """Returns this decode rank's registration; a stock rank's if not `is_described`."""
    with recorded_messages() as sent:
        receiver_of(decode, kind, reads_layouts=is_described)._register_kv_args()
    (message,) = sent
    return message


def metadata_message(
    decode,
    kind: type,
    room: int,
    kv_indices,
    required_dst_info_num: int = 1,
    aux_index=0,
    state_indices=None,
    decode_prefix_len=None,
    is_dummy: bool = False,
) -> list[bytes]:
    """Returns the message with which this decode rank requests a room's pages from prefill."""
    receiver = receiver_of(decode, kind, room, is_dummy=is_dummy)
    receiver.required_dst_info_num = required_dst_info_num
    with recorded_messages() as sent:
        pages = np.asarray(kv_indices, np.int32)
        receiver.send_metadata(pages, aux_index, state_indices, decode_prefix_len)
    decode.requested_ranks.pop(room, None)
    (message,) = sent
    return message


def parse_status(frames: list[bytes]) -> tuple[int, int, int, str | None]:
    """Returns a status message's room, status, prefill rank and reason; also a stock rank's."""
    if frames[0] != STATUS:
        return (*map(int, frames), None)
    return (*map(int, frames[1:4]), frames[4].decode() or None)
