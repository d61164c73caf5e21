"""Settings for all tests: one thread for tensor operations, which are tiny here, so that test processes do not fight."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
