"""What tests share is found, what fails is said, and two workers share the work."""

import itertools
import sys
from pathlib import Path

# pytest's importlib mode leaves that to us.
HERE = Path(__file__).parent
LONG = ("serving", "transport")
sys.path += [str(HERE / "serving"), str(HERE / "support")]


class Failed:
    """Says at once what has failed: the whole may take an hour."""

    def __init__(self, terminal):
        self.terminal = terminal

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.terminal.write_line(f" {report.nodeid} ({report.when}, {report.duration:.0f} s)")


def pytest_sessionstart(session):
    plugins = session.config.pluginmanager
    if (terminal := plugins.get_plugin("terminalreporter")) and not plugins.has_plugin("Failed"):
        plugins.register(Failed(terminal), "Failed")


def pytest_collection_modifyitems(config, items):
    """For several workers: servers beside ranks, which mostly wait, and what is short last.

    So neither is slowed down by its like, and none is busy for long when the others have ended.
    """
    if not hasattr(config, "workerinput"):
        return
    files = list(dict.fromkeys(item.path for item in items))
    rings = [[file for file in files if file.parent.name == ring] for ring in LONG]
    beside = [file for group in itertools.zip_longest(*rings) for file in group if file]
    order = {file: place for place, file in enumerate(dict.fromkeys([*beside, *files]))}
    items.sort(key=lambda item: order[item.path])
