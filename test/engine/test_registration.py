"""All buffers are registered in one batch; one that cannot be stops the server and is named."""

import probes
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.parametrize("backend", ["ascend", "mooncake"])]


def test_one_batch(backend):
    assert probes.registration(backend, []) == {"batches": [[10, 20, 30, 40]], "error": ""}


@pytest.mark.parametrize(
    "refused, named",
    [
        ([20], "KV v, layer 3 (20 bytes)"),
        ([30], "aux 0 (30 bytes)"),
        ([10, 40], "KV k, layer 3 (10 bytes), state index_k, layer 3 (40 bytes)"),
    ],
)
def test_failure_names_the_buffers(backend, refused, named):
    error = probes.registration(backend, refused)["error"]
    assert f"one by one it fails for: {named}." in error
    assert "4 buffers of 100 bytes" in error


def test_stock_goes_on(backend, stock):
    (answer,) = stock(["registration", backend, [20]])
    assert answer["error"] == ""
    assert ([40] in answer["batches"]) == (backend == "mooncake")  # Ascend forgets state
