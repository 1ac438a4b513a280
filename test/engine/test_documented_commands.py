"""Each server that the docs launch: the engine's own parser takes all of its flags and values."""

import argparse
import functools

import pytest
from documented import commands
from sglang.srt.server_args import ServerArgs

from pd_harness.releases import release

pytestmark = pytest.mark.engine

ALL = commands("python", "-m", "sglang.launch_server")
HERE = [command for command in ALL if command.release in ("", release())]


@functools.lru_cache(maxsize=1)
def parser() -> argparse.ArgumentParser:
    """The engine's; it says what it does not take, and does not end this process."""
    made = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(made)
    made.error = _refuse
    return made


def _refuse(message: str):
    raise AssertionError(message)


@pytest.mark.parametrize("command", HERE, ids=str)
def test_the_engine_takes_every_flag(command):
    words = list(command.words[3:])
    if words[-1] == "...":  # more of the same, the model among it
        words[-1:] = ["--model-path", "MODEL"]
    args = parser().parse_args(words)
    assert args.disaggregation_mode in ("prefill", "decode")


def test_a_flag_that_there_is_not_is_refused():
    with pytest.raises(AssertionError, match="--no-such-flag"):
        parser().parse_args(["--model-path", "m", "--no-such-flag"])
