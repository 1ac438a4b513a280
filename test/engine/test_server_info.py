"""`sglang-pd doctor` reads a server's sizes from its answer to /server_info."""

import dataclasses

import msgspec
import pytest
from engine_release import SINCE_0_5_23
from sglang.srt.server_args import prepare_server_args

from pd_harness.cpu_host.models import TinyGQA
from sglang_pd.doctor.servers import Server

pytestmark = pytest.mark.engine

DP_ATTENTION = ("--dp-size", "2", "--enable-dp-attention")
ATTN_DP = ("--attn-dp-size", "2")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(TinyGQA().make(tmp_path_factory.mktemp("models")))


def server_info_sizes(arguments) -> dict:
    """The sizes that a server with these arguments reports at /server_info."""
    if SINCE_0_5_23:
        arguments.resolve_once()
        answer = arguments.resolved_dict()
    else:
        answer = dataclasses.asdict(arguments)
    return {name: value for name, value in answer.items() if name in Server.__struct_fields__}


@pytest.mark.parametrize(
    ("flags", "attention_tp"),
    [((), 8), (DP_ATTENTION, 4), *([(ATTN_DP, 4)] if SINCE_0_5_23 else [])],
    ids=str,
)
def test_attention_tp_from_server_info(model_path, flags, attention_tp):
    command = ["--model-path", model_path, "--device", "cpu", "--tp-size", "8", *flags]
    server = msgspec.convert(server_info_sizes(prepare_server_args(command)), Server)
    assert (server.tp_size, server.attn_tp) == (8, attention_tp)
