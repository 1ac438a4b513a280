"""The engine's parser accepts all flags and values of each server command in the docs."""

import argparse
import functools

import pytest
from doc_commands import commands
from sglang.srt.server_args import ServerArgs

from pd_harness.releases import release

pytestmark = pytest.mark.engine

DOCUMENTED_COMMANDS = commands("python", "-m", "sglang.launch_server")
COMMANDS_OF_THIS_RELEASE = [
    command for command in DOCUMENTED_COMMANDS if command.release in ("", release())
]


@functools.lru_cache(maxsize=1)
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


@pytest.mark.parametrize("command", COMMANDS_OF_THIS_RELEASE, ids=str)
def test_engine_accepts_every_documented_flag(command):
    words = list(command.words[3:])
    if words[-1] == "...":  # stands for further flags, the model's among them
        words[-1:] = ["--model-path", "MODEL"]
    args = parser().parse_args(words)
    assert args.disaggregation_mode in ("prefill", "decode")


def test_unknown_flag_is_refused_by_the_engine(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--model-path", "m", "--no-such-flag"])
    assert "--no-such-flag" in capsys.readouterr().err
