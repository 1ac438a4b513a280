"""Let a test look into the scheduler processes of a running server.

With a folder in ``SGLANG_PD_PROBE`` every scheduler writes ``PID.json`` there when its event loop
is set up, and again at each SIGUSR1:

- ``disaggregation``, ``pp_rank``, ``tp_rank``: whose process it is
- ``pause``: the longest time in seconds, since it last wrote, in which the loop did not turn,
  without that for which other processes had its core
- ``queues``: how many requests are in each queue
- ``rooms``: the rooms in each table of the KV manager that has any

Where the folder has a file ``hold`` with a number of tokens and a word, a prefill scheduler that
has sent so many of a prompt stands still, and writes ``held-WORD``, until the file is gone.

``SGLANG_PD_HEARTBEATS_APART`` is by how many seconds each further TP rank of decode waits longer
than SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL between two looks at prefill's health, so that ranks
learn of its death one after the other.
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

from pd_harness.polling import own_time

FOLDER_VARIABLE = "SGLANG_PD_PROBE"
PAUSE_FILE = "hold"
HEARTBEATS_APART_VARIABLE = "SGLANG_PD_HEARTBEATS_APART"
HEARTBEAT_VARIABLE = "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"
MIN_ROOM = 1 << 32  # smaller numbers are ranks, ports or counts; routers draw from 63 bits
# Where the engine keeps requests, by the path from the scheduler.
QUEUES = (
    "waiting_queue",
    "running_batch.reqs",
    "disagg_prefill_bootstrap_queue.queue",
    "disagg_prefill_inflight_queue",
    "disagg_decode_prealloc_queue.queue",
    "disagg_decode_prealloc_queue.retracted_queue",
    "disagg_decode_transfer_queue.queue",
)
# Who has the KV manager, and knows its TP rank.
MANAGER_QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")


def install_scheduler_dump(module: ModuleType) -> None:
    """Hook the engine's schedulers where the environment asks for it when they are made."""
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
    """A process's main thread runs the loop and takes the signal."""
    name = "ingest_requests" if hasattr(scheduler, "ingest_requests") else "recv_requests"  # 0.5.9
    receive = getattr(scheduler, name)

    def receive_requests(*args, **kwargs):
        if not hasattr(scheduler, "scheduler_dump"):
            scheduler.scheduler_dump = SchedulerDump(scheduler, folder)
        scheduler.scheduler_dump.on_loop()
        return receive(*args, **kwargs)

    setattr(scheduler, name, receive_requests)


class SchedulerDump:
    def __init__(self, scheduler, folder: Path):
        self.scheduler = scheduler
        self.file = folder / f"{os.getpid()}.json"
        self.pause, self.last = 0.0, own_time()
        self.write()
        signal.signal(signal.SIGUSR1, lambda number, frame: self.write())

    def on_loop(self) -> None:
        """The loop begins anew."""
        while word := self._active_pause():
            self.file.with_name(f"held-{word}").touch()
            time.sleep(0.005)
        now = own_time()
        self.pause = max(self.pause, now - self.last)
        self.last = now

    def _active_pause(self) -> str | None:
        """The word of the hold for which a prompt has come far enough."""
        request = getattr(self.scheduler, "chunked_req", None)
        hold = self.file.with_name(PAUSE_FILE)
        if request is None or not hold.exists():
            return None
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            tokens, word = hold.read_text().split()
            return word if request.start_send_idx >= int(tokens) else None
        return None

    def write(self) -> None:
        """Write the file, whole or not at all, and forget all pauses but that which may last."""
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
    """Rooms in each of the manager's tables: keys, elements, and those of sets that are values."""
    classes = reversed(type(manager).__mro__)
    tables = {name: value for one in classes for name, value in vars(one).items()}
    tables.update(vars(manager))
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
