"""Requests the state of a running server's schedulers; see `pd_harness.cpu_host.scheduler_dump`."""

import contextlib
import json
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from serving_checks import seconds_until

from pd_harness import cluster
from pd_harness.cpu_host.scheduler_dump import FOLDER_VARIABLE, PAUSE_FILE

# A manager's bounded tables of ended rooms whose requests may still arrive.
REMEMBERED = ("failed_rooms", "aborted_before_request", "rooms_without_sender")
PATIENCE = 30  # seconds; a process handles the signal between two steps


def dump_environment(folder: Path) -> dict[str, str]:
    """Returns the environment of servers that support `dump_schedulers`; empties the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    return {FOLDER_VARIABLE: str(folder)}


def dump_schedulers(server: cluster.Server) -> list[dict]:
    """Returns the current state of each of a server's schedulers, with pauses since last dump."""
    folder = Path(server.environment[FOLDER_VARIABLE])
    family = psutil.Process(server.process.pid).children(recursive=True)
    files = [file for one in family if (file := folder / f"{one.pid}.json").exists()]
    assert files, f"no scheduler process of {server.name} has a probe"
    for file in files:
        file.unlink()
        os.kill(int(file.stem), signal.SIGUSR1)
    seconds_until(lambda: all(file.exists() for file in files), PATIENCE)
    return [json.loads(file.read_text()) for file in files]


def longest_pause_ms(ranks: list[dict]) -> float:
    """Returns the longest pause of any rank's event loop in these dumps, in milliseconds."""
    return round(1000 * max(seen["pause"] for seen in ranks), 1)


def raise_priority(server: cluster.Server) -> None:
    """Raises a server's priority, if allowed, so that other processes do not cause its pauses."""
    with contextlib.suppress(PermissionError):
        for process in psutil.Process(server.process.pid).children(recursive=True):
            for thread in process.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, -15)


@contextlib.contextmanager
def paused_in_mid_prompt(prefill: cluster.Server, tokens: int) -> Iterator[Callable[[], None]]:
    """Pauses the server, within the block, when it has sent `tokens` tokens of a prompt.

    Yields a function that waits for the pause. Each call uses a unique word, because a scheduler
    that paused just before the end of an earlier block may report that pause late.
    """
    word = uuid.uuid4().hex
    hold = Path(prefill.environment[FOLDER_VARIABLE]) / PAUSE_FILE
    draft = hold.with_suffix(".draft")
    draft.write_text(f"{tokens} {word}")
    draft.replace(hold)

    def wait() -> None:
        seconds_until(hold.with_name(f"paused-{word}").exists, PATIENCE)

    try:
        yield wait
    finally:
        hold.unlink()


def pending_by_rank(server: cluster.Server) -> dict[str, dict]:
    """Counts requests in queues and rooms in tables, by rank, for ranks that have any."""
    found = {}
    for seen in dump_schedulers(server):
        over = {room for name in REMEMBERED for room in seen["rooms"].get(name, ())}
        tables = {
            name: len(set(rooms) - over)
            for name, rooms in seen["rooms"].items()
            if name not in REMEMBERED
        }
        held = {name: count for name, count in {**seen["queues"], **tables}.items() if count}
        if held:
            found[f"{seen['disaggregation']} PP {seen['pp_rank']} TP {seen['tp_rank']}"] = held
    return found
