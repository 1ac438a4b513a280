"""Let idle schedulers leave the cores to others, and wake soon.

With ``--sleep-on-idle`` the engine's scheduler sleeps up to a second until its own clients ask for
something. Groups of DP attention go through their loops in step, and one that sleeps holds up all
others; a prefill scheduler sleeps also where decode will ask for a request of its; and a decode
scheduler that waits for KV does not sleep at all.

The process that deals requests to groups of DP attention never sleeps, in any release. Two such
servers burn two cores, and for as long as a minute nothing else is run: beside threads that yield,
as Gloo's do, the kernel takes one that never does for the one that had the least.
"""

import functools
import time
from types import ModuleType

from pd_harness.cpu_host.scheduler_dump import QUEUES, at_path

WORKING_SLEEP_S = 0.002  # seconds, of a scheduler that has requests and nothing to compute
MAX_SLEEP_S = 1.0
MAX_DP_SLEEP_S = 0.05
CONTROLLER_POLL_S = 0.1  # seconds between two looks of what deals requests, where none comes


def throttle_schedulers(module: ModuleType) -> None:
    """Change how long schedulers sleep that have been told to (``--sleep-on-idle``)."""
    scheduler = module.Scheduler
    name = "on_idle" if hasattr(scheduler, "on_idle") else "self_check_during_idle"  # 0.5.9
    check, run = getattr(scheduler, name), scheduler.run_batch

    @functools.wraps(check)
    def on_idle(self):
        check(self)
        if self.idle_sleeper is not None:
            _sleep_while_idle(self)

    @functools.wraps(run)
    def run_batch(self, *args, **kwargs):
        self.idle_interval = WORKING_SLEEP_S
        return run(self, *args, **kwargs)

    setattr(scheduler, name, on_idle)
    scheduler.run_batch = run_batch
    scheduler.maybe_sleep_on_idle = lambda self: None
    scheduler.idle_interval = WORKING_SLEEP_S


def throttle_controllers(module: ModuleType) -> None:
    """Let what deals requests to groups sleep until there is one, where schedulers do."""
    controller = module.DataParallelController
    loop = controller.event_loop

    @functools.wraps(loop)
    def event_loop(self):
        if self.server_args.sleep_on_idle:
            self.soft_watchdog = _ThrottledWatchdog(self.soft_watchdog, self.recv_from_tokenizer)
        loop(self)

    controller.event_loop = event_loop


class _ThrottledWatchdog:
    """A watchdog, which is fed before each look at the socket."""

    def __init__(self, watchdog, sock):
        self.watchdog, self.sock = watchdog, sock

    def feed(self) -> None:
        self.watchdog.feed()
        self.sock.poll(CONTROLLER_POLL_S * 1000)


def _sleep_while_idle(scheduler) -> None:
    """Sleep, twice as long as the last time if there is no request."""
    if any(at_path(scheduler, name) for name in QUEUES):
        scheduler.idle_interval = WORKING_SLEEP_S
        time.sleep(WORKING_SLEEP_S)
        return
    scheduler.idle_sleeper.poller.poll(scheduler.idle_interval * 1000)
    in_step = scheduler.server_args.enable_dp_attention
    scheduler.idle_interval = min(
        2 * scheduler.idle_interval, MAX_DP_SLEEP_S if in_step else MAX_SLEEP_S
    )
