"""Settings for all tests: one thread for tensor operations, which are tiny here; a CPU that does not lie; kernels in
Triton's interpreter where there is no GPU; how many examples property tests draw.
"""

import os
import signal

from hypothesis import settings

from weft.engine.cpu_features import prepare_cpu

os.environ.setdefault("OMP_NUM_THREADS", "1")
prepare_cpu()

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # now: Triton looks while it is imported, which others do as well
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes that tests start shall hear of Ctrl-C

# `--hypothesis-profile=long` chooses the other one. Numbers of examples that differ from these: tests/strength.py.
settings.register_profile("long", max_examples=100, deadline=None)
settings.register_profile("quick", max_examples=20, deadline=None)
settings.load_profile("quick")
