"""Progress bars: completions and token rate of a batch, and other work. No bar if rich is not installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]  # completions finished and tokens sampled since the last call


@contextmanager
def batch_progress(completions: int, show: bool) -> Iterator[Advance]:
    if not show or not _has_rich():
        yield lambda finished, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("completions"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:  # standard output is for results
        task = bar.add_task("", total=completions, tokens=0, rate=0.0)

        def advance(finished: int, tokens: int) -> None:
            state = bar.tasks[task]
            total = state.fields["tokens"] + tokens
            bar.update(task, advance=finished, tokens=total, rate=total / state.elapsed if state.elapsed else 0.0)

        yield advance


@contextmanager
def work_progress(name: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar for work with a known total. Yields a function that takes the amount done so far."""
    if not show or not _has_rich():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        shown = 0

        def advance(done: int) -> None:
            nonlocal shown
            if done != shown:  # most calls change nothing
                shown = done
                bar.update(task, completed=done)

        yield advance


def _has_rich() -> bool:
    """Whether rich is installed. The benchmarks of a device run without it."""
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True
