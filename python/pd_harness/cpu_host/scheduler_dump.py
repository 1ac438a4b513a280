"""Let a test inspect the scheduler processes of a running server.

With a folder in ``SGLANG_PD_SCHEDULER_DUMP`` every scheduler writes ``PID.json`` there when its
event loop starts, and again at each SIGUSR1:

- ``disaggregation``, ``pp_rank``, ``tp_rank``: the process's mode and ranks
- ``pause``: the longest iteration of the event loop since the last write, in seconds, without the
  time in which the process waited for a core
- ``queues``: how many requests are in each queue
- ``rooms``: the rooms in each of the KV manager's tables that has any

While the folder has a file ``pause`` with a number of tokens and a word, a prefill scheduler that
has sent that many tokens of a prompt pauses, and writes ``paused-WORD``.

A scheduler adds its TP rank times ``SGLANG_PD_HEARTBEATS_APART`` seconds to
SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL, so that decode ranks detect prefill's death one after the
other.
"""

import contextlib
import functools
import json
import os
import signal
import time
from collections import deque
from pathlib import Path
from types import ModuleType

from pd_harness.cpu_host.import_hooks import on_import_of
from pd_harness.polling import own_time

FOLDER_VARIABLE = "SGLANG_PD_SCHEDULER_DUMP"
PAUSE_FILE = "pause"
HEARTBEATS_APART_VARIABLE = "SGLANG_PD_HEARTBEATS_APART"
HEARTBEAT_VARIABLE = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"
MIN_ROOM = 1 << 32  # smaller numbers are ranks, ports or counts; routers draw from 63 bits
# Where the engine keeps requests: attribute paths from the scheduler.
QUEUES = (
    "waiting_queue",
    "running_batch.reqs",
    "disagg_prefill_bootstrap_queue.queue",
    "disagg_prefill_inflight_queue",
    "disagg_decode_prealloc_queue.queue",
    "disagg_decode_prealloc_queue.retracted_queue",
    "disagg_decode_transfer_queue.queue",
)
# The queues that have the KV manager and its TP rank.
MANAGER_QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")


@on_import_of("sglang.srt.managers.scheduler")
def install_scheduler_dump(module: ModuleType) -> None:
    """Hook the engine's schedulers if the environment variables are set when they are created."""
    make = module.Scheduler.__init__

    @functools.wraps(make)
    def made(self, server_args, port_args, *ranks, **more):
        if seconds := os.environ.get(HEARTBEATS_APART_VARIABLE):
            # A process has one rank, whose KV manager reads the environment.
            tp_rank = ranks[1] if ranks else module.get_parallel().tp_rank
            os.environ[HEARTBEAT_VARIABLE] = str(
                float(os.environ[HEARTBEAT_VARIABLE]) + tp_rank * float(seconds)
            )
        make(self, server_args, port_args, *ranks, **more)
        if folder := os.environ.get(FOLDER_VARIABLE):
            _hook_event_loop(self, Path(folder))

    module.Scheduler.__init__ = made


def _hook_event_loop(scheduler, folder: Path) -> None:
    """Start the dump in the event loop, whose thread is the main one and receives signals."""
    owner, name = _function_of_loop(scheduler)
    receive = getattr(owner, name)

    def receive_requests(*args, **kwargs):
        if not hasattr(scheduler, "scheduler_dump"):
            scheduler.scheduler_dump = SchedulerDump(scheduler, folder)
        scheduler.scheduler_dump.on_loop()
        return receive(*args, **kwargs)

    setattr(owner, name, receive_requests)


def _function_of_loop(scheduler) -> tuple[object, str]:
    """Owner and name of a function that the event loop calls once in each iteration."""
    if hasattr(scheduler, "ingest_requests"):
        return scheduler, "ingest_requests"
    if hasattr(scheduler, "request_receiver"):  # 0.5.18; a frozen instance, so its class is hooked
        return type(scheduler.request_receiver), "recv_requests"
    return scheduler, "recv_requests"  # 0.5.9


class SchedulerDump:
    def __init__(self, scheduler, folder: Path):
        self.scheduler = scheduler
        self.file = folder / f"{os.getpid()}.json"
        self.pause, self.last = 0.0, own_time()
        self.write()
        signal.signal(signal.SIGUSR1, lambda number, frame: self.write())

    def on_loop(self) -> None:
        """Pause if a test demands it, and measure the last iteration of the loop."""
        while word := self._active_pause():
            self.file.with_name(f"paused-{word}").touch()
            time.sleep(0.005)
        now = own_time()
        self.pause = max(self.pause, now - self.last)
        self.last = now

    def _active_pause(self) -> str | None:
        """The word in ``hold`` if the file's number of tokens has been sent, else None."""
        request = getattr(self.scheduler, "chunked_req", None)
        hold = self.file.with_name(PAUSE_FILE)
        if request is None or not hold.exists():
            return None
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            tokens, word = hold.read_text().split()
            return word if request.start_send_idx >= int(tokens) else None
        return None

    def write(self) -> None:
        """Write the file atomically, and forget all pauses but the current one."""
        pause = max(self.pause, own_time() - self.last)
        self.pause = 0.0
        scheduler = self.scheduler
        queue = _manager_queue(scheduler)
        manager = queue.kv_manager
        state = {
            "disaggregation": scheduler.server_args.disaggregation_mode,
            "pp_rank": manager.pp_rank,
            "tp_rank": queue.tp_rank,
            "pause": pause,
            "queues": {name: len(at_path(scheduler, name) or ()) for name in QUEUES},
            "rooms": rooms(manager),
        }
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(state))
        draft.replace(self.file)


def rooms(manager) -> dict[str, list[int]]:
    """Rooms in the tables of a manager and its `RoomFailures`: keys, elements, sets of values."""
    classes = reversed(type(manager).__mro__)
    tables = {name: value for one in classes for name, value in vars(one).items()}
    for owner in (manager, getattr(manager, "failures", manager)):  # not in 0.5.9 nor in stock
        tables.update(vars(owner))
    found = {name: _room_keys(table) for name, table in tables.items()}
    return {name: numbers for name, numbers in found.items() if numbers}


def _room_keys(table) -> list[int]:
    if not isinstance(table, (dict, set, deque)):
        return []
    sets = [value for value in list(getattr(table, "values", tuple)()) if isinstance(value, set)]
    keys = [key for keys in (table, *sets) for key in list(keys)]
    return [key for key in keys if type(key) is int and key >= MIN_ROOM]


def _manager_queue(scheduler):
    holders = (getattr(scheduler, name, None) for name in MANAGER_QUEUES)
    return next(holder for holder in holders if holder is not None)


def at_path(scheduler, path: str):
    """The attribute at a path of names, or None."""
    for name in path.split("."):
        scheduler = getattr(scheduler, name, None)
    return scheduler
