"""Settings for all tests: one thread for tensor operations, which are tiny here, and a CPU that does not lie."""

import os

from weft.engine.cpu import prepare_cpu

os.environ.setdefault("OMP_NUM_THREADS", "1")
prepare_cpu()
