"""On a CPU host a lock serializes a fleet's Mooncake writes; other fleets do not hold that lock."""

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
        assert is_in_time(prefill["seconds"], 0.8), prefill  # a wait for the lock takes 1 s
