"""Engines: all engines of a server. The one place where an engine is chosen for a request."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Protocol

import msgspec

from weft.observe.engine_metrics import EngineMetrics, EngineStep
from weft.observe.metrics import ServerMetrics
from weft.serve.engines.engine_client import EngineCallbacks, EngineClient, EngineHealth
from weft.serve.engines.engine_connection import EngineLoad
from weft.serve.engines.engine_folder import remove_stale_folders
from weft.serve.engines.messages import EngineInfo, EngineProcessConfig
from weft.serve.engines.submitted_request import EnginePrompt

# Facts that a request is checked against before an engine is chosen for it: all engines must have the same. Others are
# measured (gap_target, min_gap_target), or depend on the memory that an engine found (num_blocks, max_model_len).
COMMON = (
    *("vocab_size", "hidden_size", "block_size", "max_num_seqs", "policy", "enable_prefix_caching", "block_space"),
    *("gap_source", "ttft_target", "ttft_target_per_1k", "ttft_source"),
)
STARVED_STEPS = 64  # after so many the operator is warned once that the gap target leaves prefills hardly any time
STARVED = (
    "the promised gap leaves prompts less than a quarter of the pace that --policy chunked would give them; "
    "raise --gap-target-ms, or leave it out (weft_starved_steps_total counts on)"
)


class EngineRouter(Protocol):
    """Chooses an engine for each request."""

    def choose(self, handles: Sequence[EngineClient], prompts: Sequence[EnginePrompt]) -> EngineClient:
        """One of the handles, which are at least one. `prompts` is empty if the body has not been read yet."""
        ...


class SingleEngineRouter:
    """The router of a server with one engine."""

    def choose(self, handles: Sequence[EngineClient], prompts: Sequence[EnginePrompt]) -> EngineClient:
        return handles[0]


class LeastLoadedRouter:
    """Chooses the engine with the fewest streams, running, waiting or just sent; of several the first by name."""

    def choose(self, handles: Sequence[EngineClient], prompts: Sequence[EnginePrompt]) -> EngineClient:
        return min(handles, key=lambda handle: (handle.load.streams, handle.name))


class EnginePool:
    """Owns the handles. One engine is enough for the server to be ready; it has failed when all are given up."""

    def __init__(
        self,
        orders: EngineProcessConfig,
        metrics: ServerMetrics,
        log: Callable[[str], None],
        router: EngineRouter | None = None,
    ) -> None:
        """One engine for each one in `metrics`, all with the same orders."""
        self.changed = asyncio.Event()  # set when an engine becomes ready, or is given up
        self._metrics, self._log = metrics, log
        self._first: tuple[str, EngineInfo] | None = None  # the first engine that was ready; all must be like it
        several = len(metrics.engines) > 1
        self._router = router or (LeastLoadedRouter() if several else SingleEngineRouter())
        self.handles = tuple(
            self._new_handle(name, engine, orders, several=several) for name, engine in metrics.engines.items()
        )

    def _new_handle(
        self, name: str, metrics: EngineMetrics, orders: EngineProcessConfig, *, several: bool
    ) -> EngineClient:
        if several and orders.record_steps is not None:  # processes must not write to the same file
            orders = msgspec.structs.replace(orders, record_steps=f"{orders.record_steps}.{name}")
        events = EngineCallbacks(
            on_step=partial(self._step, metrics),
            on_ready=partial(self._ready, name, metrics),
            on_death=metrics.lost,
            on_given_up=partial(self._given_up, name),
            on_log=(lambda line: self._log(f"engine {name}: {line}")) if several else self._log,
        )
        return EngineClient(name, orders, events)

    @property
    def facts(self) -> EngineInfo | None:
        """Of the engines that are ready, to check requests against; None: no engine is ready."""
        known = [facts for handle in self.handles if (facts := handle.facts) is not None]
        if len(known) < 2:
            return known[0] if known else None
        gaps = [facts.gap_target for facts in known if facts.gap_target is not None]
        # What every engine can serve, and can promise.
        return msgspec.structs.replace(
            known[0],
            max_model_len=min(facts.max_model_len for facts in known),
            gap_target=max(gaps, default=None),
            min_gap_target=max(facts.min_gap_target for facts in known),
        )

    @property
    def health(self) -> EngineHealth:
        """Of the best engine."""
        found = {handle.health for handle in self.handles}
        return next(health for health in EngineHealth if health in found)

    @property
    def fatal(self) -> str | None:
        """Why no engine will be started again; None: one runs, or may be started."""
        reasons = [(handle.name, handle.fatal) for handle in self.handles if handle.fatal is not None]
        if len(reasons) < len(self.handles):
            return None
        if len({reason for _, reason in reasons}) == 1:
            return reasons[0][1]
        return "; ".join(f"engine {name}: {reason}" for name, reason in reasons)

    @property
    def load(self) -> EngineLoad:
        """The sum over all engines."""
        loads = [handle.load for handle in self.handles]
        return EngineLoad(*(sum(getattr(load, field.name) for load in loads) for field in fields(EngineLoad)))

    @property
    def ready(self) -> frozenset[str]:
        """The names of the engines that are ready."""
        return frozenset(handle.name for handle in self.handles if handle.health is EngineHealth.READY)

    @property
    def pids(self) -> dict[str, int | None]:
        """The process ids of the engines, by name."""
        return {handle.name: handle.pid for handle in self.handles}

    def start(self) -> None:
        with contextlib.suppress(OSError):
            remove_stale_folders()
        for handle in self.handles:
            handle.start()

    async def close(self) -> None:
        """Ends all engine processes. Requests that still run are lost."""
        await asyncio.gather(*(handle.close() for handle in self.handles))

    def choose(self, prompts: Sequence[EnginePrompt] = ()) -> EngineClient:
        """The engine for a request: one that is ready. If none is, any: the request gets its error there, or waits."""
        ready = [handle for handle in self.handles if handle.health is EngineHealth.READY]
        return self._router.choose(ready or self.handles, prompts)

    def lose_jobs(self, reason: str) -> None:
        """Ends all jobs with an error."""
        for handle in self.handles:
            handle.lose_jobs(reason)

    def reset_cache(self) -> None:
        for handle in self.handles:
            handle.reset_cache()

    def _step(self, metrics: EngineMetrics, step: EngineStep) -> None:
        metrics.step(step)
        if step.starved and self._metrics.starved_steps == STARVED_STEPS:
            self._log(STARVED)

    def _ready(self, name: str, metrics: EngineMetrics, facts: EngineInfo) -> str | None:
        self._first = self._first or (name, facts)
        if reason := _difference(facts, self._first[1]):
            return f"its {reason} in engine {self._first[0]}"
        metrics.ready(facts.block_size, facts.num_blocks)
        self.changed.set()
        return None

    def _given_up(self, name: str) -> None:
        if self.fatal is None:  # else the server ends with the reason
            reason = next(handle.fatal for handle in self.handles if handle.name == name)
            self._log(f"engine {name} is given up: {reason}")
        self.changed.set()


def _difference(facts: EngineInfo, other: EngineInfo) -> str | None:
    """A fact that must be the same for both but is not, in words."""
    for field in COMMON:
        own, its = getattr(facts, field), getattr(other, field)
        if own != its:
            return f"{field} is {own}, but {its}"
    return None
