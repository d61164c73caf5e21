"""The live view of a run: a few lines on stderr, four times per second. Standard output is for results."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from weft.bench.http.drive import LoadRun
from weft.bench.http.figures import gaps, lag, ttft

REFRESH_S = 0.25
RECENT_REPLIES = 200  # the percentiles are over the last RECENT_REPLIES complete replies


@contextlib.asynccontextmanager
async def live_view(run: LoadRun, show: bool) -> AsyncIterator[None]:
    if not show:
        yield
        return
    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        async def draw() -> None:
            clock = asyncio.get_running_loop().time
            start = clock()
            while True:
                live.update(view(run, clock() - start), refresh=True)
                await asyncio.sleep(REFRESH_S)

        drawing = asyncio.create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drawing


def view(run: LoadRun, seconds: float) -> Table:
    table = Table(box=None, show_header=False)
    done = [reply for reply in run.replies if reply.is_complete]
    written = sum(reply.output_tokens for reply in done)
    failed = len(run.replies) - len(done)
    of = "" if run.planned is None else f" of {run.planned}"
    table.add_row("requests", f"{run.sent}{of} sent, {run.in_flight} under way, {len(done)} done")
    table.add_row("failed", f"[red]{failed}: {escape(_last_error(run))}[/red]" if failed else "0")
    seconds = max(seconds, 1e-9)
    table.add_row("rates", f"{len(done) / seconds:.1f} requests/s, {written / seconds:.0f} tokens/s")
    recent = done[-RECENT_REPLIES:]
    if recent:
        table.add_row("ttft", _percentiles(np.array([ttft(reply) for reply in recent])))
        table.add_row("gap", _percentiles(np.concatenate([np.empty(0), *map(gaps, recent)])))
        table.add_row("client lag", _percentiles(np.array([lag(reply) for reply in recent])))
    return table


def _percentiles(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> str:
    if not len(values):
        return "-"
    middle, high = np.percentile(values * 1e3, (50, 99))
    return f"p50 {middle:.1f} ms, p99 {high:.1f} ms (last {RECENT_REPLIES} requests)"


def _last_error(run: LoadRun) -> str:
    return next((reply.error for reply in reversed(run.replies) if reply.error), "")[:80]
