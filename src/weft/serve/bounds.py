"""Bounds that a process sets itself before it runs what others have written. It dies of them, and nothing else does."""

import signal


def limit_time(seconds: float) -> None:
    """Processor time from now on; 0: no limit. A signal ends the process, also in the middle of a library."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(more: int) -> None:
    """Bytes that the process may take beside those that it has."""
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
