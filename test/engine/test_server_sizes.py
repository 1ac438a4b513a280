"""What a server says of its sizes, and what `sglang-pd doctor` makes of it."""

import dataclasses

import msgspec
import pytest
from of_release import IS_LATER
from sglang.srt.server_args import prepare_server_args

from pd_harness.cpu_host.models import TinyGQA
from sglang_pd.doctor.servers import Server

pytestmark = pytest.mark.engine

OLD = ("--dp-size", "2", "--enable-dp-attention")
LATER = ("--attn-dp-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(TinyGQA().make(tmp_path_factory.mktemp("models")))


def said(arguments) -> dict:
    """Of sizes, as in the answer to /server_info."""
    if IS_LATER:
        arguments.resolve_once()
        answer = arguments.resolved_dict()
    else:
        answer = dataclasses.asdict(arguments)
    return {name: value for name, value in answer.items() if name in Server.__struct_fields__}


@pytest.mark.parametrize(
    ("flags", "attention_tp"),
    [((), 8), (OLD, 4), *([(LATER, 4)] if IS_LATER else [])],
    ids=str,
)
def test_attention_tp(model, flags, attention_tp):
    command = ["--model-path", model, "--device", "cpu", "--tp-size", "8", *flags]
    server = msgspec.convert(said(prepare_server_args(command)), Server)
    assert (server.tp_size, server.attn_tp) == (8, attention_tp)
