"""Settings for all tests: one thread for tensor operations, which are tiny here, and a CPU that does not lie."""

import os
import signal

from weft.engine.cpu import prepare_cpu

os.environ.setdefault("OMP_NUM_THREADS", "1")
prepare_cpu()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start shall hear of Ctrl-C
