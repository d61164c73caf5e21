from collections.abc import Iterator

import pytest

from tests.page.browser import CHROMIUM, Browser
from tests.page.synthetic import SyntheticServer
from tests.serve.running import RunningServer

KEYS = ("alpha-key", "beta-key")


@pytest.fixture(scope="session")
def session_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def browser(session_browser: Browser) -> Iterator[Browser]:
    """The tab. Whatever the page complains about in a test fails it, unless the test takes it out of the list."""
    session_browser.complaints.clear()
    session_browser.shape(1280, 900)
    yield session_browser
    session_browser.open("about:blank#")
    assert session_browser.complaints == []


@pytest.fixture(scope="session")
def keyed_server() -> Iterator[RunningServer]:
    """A server with the default model and two keys."""
    limits = ("--policy", "chunked", "--max-num-batched-tokens", "128", "--max-num-seqs", "32")
    keys = [word for key in KEYS for word in ("--api-key", key)]
    server = RunningServer(*limits, "--kv-cache-memory-bytes", "128MiB", *keys)
    yield server
    assert server.stop() == 0, server.log


@pytest.fixture
def synthetic() -> Iterator[SyntheticServer]:
    server = SyntheticServer()
    yield server
    server.close()
