"""The worker processes of a sweep."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from weft.errors import EngineError
from weft.sim.sweep_grid import Score, SweepRun
from weft.sim.sweep_run import Material, score_run

CHECK_S = 1.0  # seconds between checks of the clock, and of whether the parent process is alive
_material: Material | None = None  # of a worker process; sent once instead of with every run


class SweepWorkers:
    """A process pool with at most one run per worker. Leaving the context ends the workers at once."""

    def __init__(self, count: int, material: Material) -> None:
        # A fork needs no second import. It is safe, because this process has no other threads.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._count = count
        self._pool = ProcessPoolExecutor(count, context, _prepare, (material, os.getpid()))
        self._not_ours = set(multiprocessing.active_children())
        self._runs: dict[Future[list[Score]], SweepRun] = {}

    def __enter__(self) -> "SweepWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._runs:  # the pool itself would wait for the end of these runs
            for worker in set(multiprocessing.active_children()) - self._not_ours:
                worker.terminate()
        self._pool.shutdown()

    @property
    def is_busy(self) -> bool:
        return bool(self._runs)

    @property
    def has_idle(self) -> bool:
        return len(self._runs) < self._count

    def submit(self, run: SweepRun) -> None:
        self._runs[self._pool.submit(_score, run)] = run

    def results(self) -> Iterator[tuple[SweepRun, list[Score]]]:
        """Results that have arrived; waits at most STALE seconds."""
        for future in wait(self._runs, CHECK_S, FIRST_COMPLETED).done:
            run = self._runs[future]
            try:
                scores = future.result()
            except BrokenProcessPool:
                runs = ", ".join(f"{run.name} at x{run.scale:g}" for run in self._runs.values())
                raise EngineError(
                    f"a worker was killed while the workers ran {runs}; was it memory? try fewer --jobs. What is done "
                    "is in the file"
                ) from None
            except Exception as error:
                raise EngineError(f"{run.name} at x{run.scale:g} failed:\n{error.__cause__ or error}") from None
            del self._runs[future]
            yield run, scores


def _prepare(material: Material, parent: int) -> None:
    """Prepares a worker process."""
    global _material
    _material = material
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then ends the workers
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this worker if its parent was killed. The other workers hold the pool's pipes open, so no read fails."""
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    os._exit(1)


def _score(run: SweepRun) -> list[Score]:
    assert _material is not None
    return score_run(run, _material)
