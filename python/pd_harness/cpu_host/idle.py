"""Let idle schedulers leave the cores to others, and wake soon.

With ``--sleep-on-idle`` the engine's scheduler sleeps up to a second until its own clients ask for
something. Groups of DP attention go through their loops in step, and one that sleeps holds up all
others; a prefill scheduler sleeps also where decode will ask for a request of its; and a decode
scheduler that waits for KV does not sleep at all.
"""

import functools
import time
from types import ModuleType

from pd_harness.cpu_host.probe import QUEUES, at_path

WAITING = 0.002  # seconds, of a scheduler that has requests and nothing to compute
LONGEST = 1.0
LONGEST_IN_STEP = 0.05


def rested_schedulers(module: ModuleType) -> None:
    """Change how long schedulers sleep that have been told to (``--sleep-on-idle``)."""
    scheduler = module.Scheduler
    name = "on_idle" if hasattr(scheduler, "on_idle") else "self_check_during_idle"  # 0.5.9
    check, run = getattr(scheduler, name), scheduler.run_batch

    @functools.wraps(check)
    def on_idle(self):
        check(self)
        if self.idle_sleeper is not None:
            _rest(self)

    @functools.wraps(run)
    def run_batch(self, *args, **kwargs):
        self.rest = WAITING
        return run(self, *args, **kwargs)

    setattr(scheduler, name, on_idle)
    scheduler.run_batch = run_batch
    scheduler.maybe_sleep_on_idle = lambda self: None
    scheduler.rest = WAITING


def _rest(scheduler) -> None:
    """Sleep, twice as long as the last time if there is no request."""
    if any(at_path(scheduler, name) for name in QUEUES):
        scheduler.rest = WAITING
        time.sleep(WAITING)
        return
    scheduler.idle_sleeper.poller.poll(scheduler.rest * 1000)
    in_step = scheduler.server_args.enable_dp_attention
    scheduler.rest = min(2 * scheduler.rest, LONGEST_IN_STEP if in_step else LONGEST)
