"""Settings for all tests: one thread for tensor operations, which are tiny here; a CPU that does not lie; kernels in
Triton's interpreter where there is no GPU; how many examples property tests draw. And the server that most tests share.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.serve.running import RunningServer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start shall hear of Ctrl-C

# `--hypothesis-profile=long` chooses the other one. Numbers of examples that differ from these: tests/strength.py.
settings.register_profile("long", max_examples=100, deadline=None)
settings.register_profile("quick", max_examples=20, deadline=None)
settings.load_profile("quick")

# Where bytecode is not to be written: names a folder for that of the processes that tests start, as long as tests run.
# Else each of two hundred processes would compile weft anew.
COMPILED = "WEFT_TESTS_BYTECODE"


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if sys.dont_write_bytecode and not is_worker:
        os.environ[COMPILED] = folder = tempfile.mkdtemp(prefix="weft-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if getattr(config.option, "numprocesses", None) and not is_worker:
        return  # this process only hands tests out to others
    if COMPILED in os.environ:
        os.environ["PYTHONPYCACHEPREFIX"] = os.environ[COMPILED]
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    from weft.engine.cpu_features import prepare_cpu

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare_cpu()

    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # now: Triton looks while it is imported, which others do as well


@pytest.fixture(scope="session")
def server() -> "Iterator[RunningServer]":
    """Shared by tests that leave no trace. It promises nothing, as machines that run tests are slow at times."""
    from tests.serve.running import RunningServer

    server = RunningServer("--policy", "chunked", "--max-num-seqs", "64", "--kv-cache-memory-bytes", "256MiB")
    yield server
    assert server.stop() == 0, server.log
