"""Let idle schedulers yield their cores, and wake soon.

With ``--sleep-on-idle`` the engine's scheduler sleeps for up to a second until its own clients send
a request. Groups of DP attention run their loops in lockstep, and one that sleeps delays all
others; a prefill scheduler sleeps even while its requests wait for decode's messages; and a decode
scheduler that waits for KV does not sleep at all.

The process that distributes requests to groups of DP attention never sleeps, in any release. Two
such servers occupy two cores, and nothing else runs for up to a minute: next to threads that yield,
like Gloo's, the kernel treats a thread that never yields as the one that has run least.
"""

import functools
import time
from types import ModuleType

from pd_harness.cpu_host.import_hooks import on_import_of
from pd_harness.cpu_host.scheduler_dump import QUEUES, at_path

WORKING_SLEEP_S = 0.002  # of a scheduler that has requests and nothing to compute
MAX_SLEEP_S = 1.0
MAX_DP_SLEEP_S = 0.05
CONTROLLER_POLL_S = 0.1  # longest wait of an idle controller between two polls


@on_import_of("sglang.srt.managers.scheduler")
def throttle_schedulers(module: ModuleType) -> None:
    """Change how long idle schedulers sleep that run with ``--sleep-on-idle``."""
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


@on_import_of("sglang.srt.managers.data_parallel_controller")
def throttle_controllers(module: ModuleType) -> None:
    """Let the DP controller sleep until a request comes, with ``--sleep-on-idle``."""
    controller = module.DataParallelController
    loop = controller.event_loop

    @functools.wraps(loop)
    def event_loop(self):
        if self.server_args.sleep_on_idle:
            self.soft_watchdog = _ThrottledWatchdog(self.soft_watchdog, self.recv_from_tokenizer)
        loop(self)

    controller.event_loop = event_loop


class _ThrottledWatchdog:
    """A watchdog whose ``feed``, called before each receive, waits until the socket has data."""

    def __init__(self, watchdog, sock):
        self.watchdog, self.sock = watchdog, sock

    def feed(self) -> None:
        self.watchdog.feed()
        self.sock.poll(CONTROLLER_POLL_S * 1000)


def _sleep_while_idle(scheduler) -> None:
    """Sleep `WORKING_SLEEP_S` if there are requests, else up to twice as long as the last time."""
    if any(at_path(scheduler, name) for name in QUEUES):
        scheduler.idle_interval = WORKING_SLEEP_S
        time.sleep(WORKING_SLEEP_S)
        return
    scheduler.idle_sleeper.poller.poll(scheduler.idle_interval * 1000)
    in_step = scheduler.server_args.enable_dp_attention
    scheduler.idle_interval = min(
        2 * scheduler.idle_interval, MAX_DP_SLEEP_S if in_step else MAX_SLEEP_S
    )
