"""Idle schedulers sleep longer and longer without a request, and shortly with one."""

from types import SimpleNamespace

import pytest

from pd_harness.cpu_host import idle


class Scheduler:
    """Stands in for the parts of the engine's scheduler that the harness changes.

    Attributes:
        polled: Milliseconds of each poll for clients, and negative, of each sleep.
    """

    def __init__(self, dp: bool = False, sleeps: bool = True):
        self.polled: list[float] = []
        poller = SimpleNamespace(poll=self.polled.append)
        self.idle_sleeper = SimpleNamespace(poller=poller) if sleeps else None
        self.server_args = SimpleNamespace(enable_dp_attention=dp)
        self.waiting_queue: list[str] = []
        self.checks = 0

    def self_check_during_idle(self):
        self.checks += 1
        self.maybe_sleep_on_idle()

    def maybe_sleep_on_idle(self):
        raise AssertionError("the engine's own sleep")

    def run_batch(self, batch):
        return batch


@pytest.fixture
def scheduler(monkeypatch):
    """A function that makes a throttled `Scheduler`."""
    changed = type("Scheduler", (Scheduler,), dict(vars(Scheduler)))
    idle.throttle_schedulers(SimpleNamespace(Scheduler=changed))

    def made(**options):
        one = changed(**options)
        monkeypatch.setattr(idle.time, "sleep", lambda seconds: one.polled.append(-1000 * seconds))
        return one

    return made


@pytest.mark.parametrize(("dp", "longest"), [(False, 1000), (True, 50)])
def test_idle_scheduler_sleeps_longer_each_time(scheduler, dp, longest):
    one = scheduler(dp=dp)
    for _ in range(12):
        one.self_check_during_idle()
    assert one.checks == 12
    assert one.polled[:4] == [2, 4, 8, 16]
    assert one.polled[-1] == max(one.polled) == longest


def test_batch_or_waiting_request_resets_idle_sleep(scheduler):
    one = scheduler()
    for _ in range(6):
        one.self_check_during_idle()
    assert one.run_batch("batch") == "batch"
    one.self_check_during_idle()
    assert one.polled[-2:] == [64, 2]
    one.waiting_queue.append("request")
    one.self_check_during_idle()
    one.waiting_queue.clear()
    one.self_check_during_idle()
    assert one.polled[-2:] == [-2, 2]


def test_scheduler_without_idle_sleeper_does_not_sleep(scheduler):
    one = scheduler(sleeps=False)
    one.self_check_during_idle()
    assert one.polled == []


class Controller:
    """Stands in for the engine's controller, which checks for messages without ever waiting."""

    def __init__(self, sleeps: bool, came: list[str]):
        self.server_args = SimpleNamespace(sleep_on_idle=sleeps)
        self.done: list = []
        self.soft_watchdog = SimpleNamespace(feed=lambda: self.done.append("fed"))
        self.recv_from_tokenizer = SimpleNamespace(poll=self.done.append)
        self.came = came

    def event_loop(self):
        while self.came:
            self.soft_watchdog.feed()
            self.done.append(self.came.pop(0))


@pytest.mark.parametrize(
    ("sleeps", "done"),
    [
        (True, ["fed", 100, "one", "fed", 100, "two"]),
        (False, ["fed", "one", "fed", "two"]),
    ],
)
def test_controller_blocks_on_socket_if_sleep_on_idle(sleeps, done):
    changed = type("Controller", (Controller,), dict(vars(Controller)))
    idle.throttle_controllers(SimpleNamespace(DataParallelController=changed))
    one = changed(sleeps, ["one", "two"])
    one.event_loop()
    assert one.done == done
