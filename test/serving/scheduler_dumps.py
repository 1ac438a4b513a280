"""What scheduler processes of a running server say of themselves: `pd_harness.cpu_host.scheduler_dump`."""

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

# What a manager keeps of rooms that are over, for requests that may still come; bounded.
REMEMBERED = ("failed_rooms", "aborted_before_request", "failed_rooms", "rooms_without_sender")
PATIENCE = 30  # seconds; a process takes the signal between two steps


def dump_environment(folder: Path) -> dict[str, str]:
    """Environment of servers that answer `dump_schedulers`; the folder is emptied."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    return {FOLDER_VARIABLE: str(folder)}


def dump_schedulers(server: cluster.Server) -> list[dict]:
    """What each scheduler process of a server sees now; pauses are since the last look."""
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
    """In which the event loop of a rank did not turn, since it was last looked at."""
    return round(1000 * max(seen["pause"] for seen in ranks), 1)


def raise_priority(server: cluster.Server) -> None:
    """Before what else runs on this machine, where that is allowed: its pauses are then its own."""
    with contextlib.suppress(PermissionError):
        for process in psutil.Process(server.process.pid).children(recursive=True):
            for thread in process.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, -15)


@contextlib.contextmanager
def paused_in_mid_prompt(prefill: cluster.Server, tokens: int) -> Iterator[Callable[[], None]]:
    """Let the server stand still when it has sent so many tokens of a prompt, within the block.

    Gives a function that waits until it does. A scheduler that saw the hold just before it ended
    may say so after it: each has a word of its own.
    """
    word = uuid.uuid4().hex
    hold = Path(prefill.environment[FOLDER_VARIABLE]) / PAUSE_FILE
    draft = hold.with_suffix(".draft")
    draft.write_text(f"{tokens} {word}")
    draft.replace(hold)

    def wait() -> None:
        seconds_until(hold.with_name(f"held-{word}").exists, PATIENCE)

    try:
        yield wait
    finally:
        hold.unlink()


def rank_name(seen: dict) -> str:
    return f"{seen['disaggregation']} PP {seen['pp_rank']} TP {seen['tp_rank']}"


def pending_by_rank(server: cluster.Server) -> dict[str, dict]:
    """Requests in queues and rooms in tables, of each rank that has any."""
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
            found[rank_name(seen)] = held
    return found
