"""Limits that a child process sets for itself before it runs untrusted input. Only that process dies of them."""

import signal


def limit_time(seconds: float) -> None:
    """Limits CPU time from now on; 0: no limit. A signal kills the process, even inside a C library."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(more: int) -> None:
    """Limits memory to `more` bytes on top of the current address space."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return
    resource.setrlimit(resource.RLIMIT_AS, (own + more, own + more))
