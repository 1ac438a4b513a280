"""Mooncake's writes take turns on a CPU host, and a fleet's ranks wait for those of no other."""

import pytest
from fleet import Fleet
from transfer_checks import assert_right

from pd_harness.cpu_host.turns import Turn
from pd_harness.waiting import in_time

pytestmark = pytest.mark.transport


def test_the_turn_of_another_test_holds_up_nobody(serve):
    with Turn("mooncake").taken() as held, serve(Fleet(backend="mooncake")) as servers:
        assert held
        assert_right(servers)
        (prefill,) = servers.request([1, 2], [3, 4]).prefill
        assert in_time(prefill["seconds"], 0.8), prefill  # a turn that does not come takes 1 s
