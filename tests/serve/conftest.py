from collections.abc import Iterator

import pytest

from tests.serve.running import RunningServer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Shared by tests that leave no trace. It promises nothing, as machines that run tests are slow at times."""
    server = RunningServer("--policy", "chunked", "--max-num-seqs", "64", "--kv-cache-memory-bytes", "256MiB")
    yield server
    assert server.stop() == 0, server.log
