"""Ranks for tests of what 0.5.18 lacks of later releases."""

import pytest


@pytest.fixture(params=["mooncake", "nixl"])
def backend(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def published():
    """Publishes the engine configuration that managers read."""
    import fake_managers

    with fake_managers.published_config():
        yield


@pytest.fixture
def prefill(backend, published):
    import fake_managers

    return fake_managers.prefill_rank(backend)


@pytest.fixture
def decode(backend, published):
    import fake_managers

    decode = fake_managers.decode_rank(backend)
    decode.abort_on_prefill = lambda *room: None  # no thread
    return decode
