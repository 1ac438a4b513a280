"""Sets up import paths, failure reports, nightly marks and the order for several workers."""

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from pd_harness.forks import SHARED_FOLDER_VARIABLE
from pd_harness.releases import default_release, release

# pytest's importlib mode does not extend `sys.path`; the last line of this block does.
HERE = Path(__file__).parent
LONG_RUNNING_SUITES = ("serving", "transport")
LONG_SECONDS = 900  # tests with such a timeout, or a longer one, start early
# Releases other than the default run these at night only: by day they have the engine tests, some
# transfers and a few servers.
NIGHTLY_FOR_OTHER_RELEASES = {
    "engine/test_peer_sockets.py",
    "engine/test_peer_silence.py",
    *(
        f"transport/test_{subject}.py"
        for subject in (
            "decode_abort",
            "first_request",
            "metrics",
            "page_bounds",
            "faults",
            "fuzz",
            "memfabric_faults",
            "memory",
            "metadata",
            "packed_faults",
            "room_ids",
            "state_transfer",
            "stopped_peer",
            "unservable_requests",
            "verify",
        )
    ),
}
sys.path += [str(HERE / "serving"), str(HERE / "support"), str(HERE.parent / "scripts")]


class FailureReporter:
    """Prints each failure at once: the whole run may take an hour."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            where = f"{report.nodeid} ({report.when}, {report.duration:.0f} s)"
            crash = getattr(report.longrepr, "reprcrash", None)
            self.terminal.write_line(f" {where}: {crash.message if crash else report.longrepr}")


def pytest_configure(config):
    """Lets workers share fork servers, which import the engine for servers and ranks."""
    if getattr(config.option, "numprocesses", None):
        folder = tempfile.TemporaryDirectory(prefix="sglang-pd-")
        os.environ[SHARED_FOLDER_VARIABLE] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_sessionstart(session):
    plugins = session.config.pluginmanager
    if (terminal := plugins.get_plugin("terminalreporter")) and not plugins.has_plugin(
        "FailureReporter"
    ):
        plugins.register(FailureReporter(terminal), "FailureReporter")


def pytest_itemcollected(item):
    file = "/".join(item.path.parts[-2:])
    if (
        file in NIGHTLY_FOR_OTHER_RELEASES
        and release() != default_release()
        and not is_nightly(item)
    ):
        item.add_marker("nightly")
        item.add_marker("elsewhere")


@pytest.hookimpl(trylast=True)  # after the hooks that deselect items
def pytest_collection_modifyitems(config, items):
    """Interleaves server tests with rank tests for several workers, and puts short tests last.

    Ranks mostly wait, so they hardly slow down the servers beside them; with short tests last, no
    worker is busy for long after the others. At night the few very long tests come first.
    """
    if not hasattr(config, "workerinput"):
        return
    at_night = any(map(is_nightly, items))
    suites = defaultdict(list)
    for item in items:
        suite = item.path.parent.name
        # By day the tests of a file stay together, and files alternate.
        unit = item if at_night else item.path
        suites[suite if suite in LONG_RUNNING_SUITES or is_nightly(item) else ""].append(unit)
    order = {}
    for suite, found in suites.items():
        found = list(dict.fromkeys(found))
        each = 1 / len(found) if at_night else 1
        order |= {one: (at * each if suite else len(items)) for at, one in enumerate(found)}
    if at_night:
        items.sort(key=lambda item: (not has_long_timeout(item), order[item]))
    else:
        items.sort(key=lambda item: order[item.path])


def has_long_timeout(item) -> bool:
    """Whether a test may take so long that it must start before the others finish."""
    limit = item.get_closest_marker("timeout")
    return limit is not None and limit.args[0] >= LONG_SECONDS


def is_nightly(item) -> bool:
    return item.get_closest_marker("nightly") is not None
