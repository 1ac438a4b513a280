"""Mooncake's writes take turns on a CPU host, and a fleet's ranks wait for those of no other."""

import pytest
from fleet import Fleet
from transfer_checks import assert_transfers

from pd_harness.cpu_host.file_lock import FileLock
from pd_harness.polling import is_in_time

pytestmark = pytest.mark.transport


def test_write_lock_of_another_test_does_not_block(serve):
    with FileLock("mooncake").acquired() as held, serve(Fleet(backend="mooncake")) as servers:
        assert held
        assert_transfers(servers)
        (prefill,) = servers.request([1, 2], [3, 4]).prefill
        assert is_in_time(prefill["seconds"], 0.8), prefill  # a turn that does not come takes 1 s
