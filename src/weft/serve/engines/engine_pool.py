"""EnginePool: all engines of a server. It chooses an engine for each request."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Protocol

import msgspec

from weft import __version__
from weft.core import Source
from weft.observe.engine_metrics import EngineMetrics, EngineStep
from weft.observe.frames import EngineFrame, encode_frame
from weft.observe.metrics import ServerMetrics
from weft.observe.recording_buffer import RecordingBuffer
from weft.serve.engines.engine_client import EngineCallbacks, EngineClient, EngineHealth
from weft.serve.engines.engine_connection import EngineLoad
from weft.serve.engines.engine_folder import remove_stale_folders
from weft.serve.engines.engine_prompt import EnginePrompt
from weft.serve.engines.messages import EngineInfo, EngineProcessConfig, clock

# Fields of EngineInfo that must be equal for all engines, because a request is checked before its engine is chosen.
# The other fields are measured (gap_target, min_gap_target) or depend on free memory (num_blocks, max_model_len).
COMMON = (
    *("vocab_size", "hidden_size", "block_size", "max_num_seqs", "policy", "enable_prefix_caching", "block_space"),
    *("gap_source", "ttft_target", "ttft_target_per_1k", "ttft_source"),
)
STARVED_STEPS = 64  # after this number, one warning: the gap target leaves hardly any time for prefills
STARVED_WARNING = (
    "the promised gap leaves prompts less than a quarter of the pace that --policy chunked would give them; "
    "raise --gap-target-ms, or leave it out (weft_starved_steps_total counts on)"
)


class EngineRouter(Protocol):
    """Chooses an engine for each request."""

    def choose(self, clients: Sequence[EngineClient], prompts: Sequence[EnginePrompt]) -> EngineClient:
        """One of the clients; there is at least one. `prompts` is empty if the body has not been read yet."""
        ...


class SingleEngineRouter:
    """The router of a server with one engine."""

    def choose(self, clients: Sequence[EngineClient], prompts: Sequence[EnginePrompt]) -> EngineClient:
        return clients[0]


class LeastLoadedRouter:
    """Chooses the engine with the fewest sequences, running, waiting or just sent; the first by name of several."""

    def choose(self, clients: Sequence[EngineClient], prompts: Sequence[EnginePrompt]) -> EngineClient:
        return min(clients, key=lambda client: (client.load.sequences, client.name))


class EnginePool:
    """Owns the engine clients. The server is ready if one engine is. It fails when all engines have failed."""

    def __init__(
        self,
        config: EngineProcessConfig,
        metrics: ServerMetrics,
        say: Callable[[str], None],
        router: EngineRouter | None = None,
        recording: RecordingBuffer | None = None,
    ) -> None:
        """Creates one engine for each one in `metrics`, all with the same config."""
        self.changed = asyncio.Event()  # set when an engine becomes ready, or has failed
        self._metrics, self._say = metrics, say
        self._recording = recording or RecordingBuffer()
        self._first: tuple[str, EngineInfo] | None = None  # the first engine that was ready; all others must be like it
        several = len(metrics.engines) > 1
        self._router = router or (LeastLoadedRouter() if several else SingleEngineRouter())
        self.clients = tuple(
            self._new_client(name, engine, config, several=several) for name, engine in metrics.engines.items()
        )

    def _new_client(
        self, name: str, metrics: EngineMetrics, config: EngineProcessConfig, *, several: bool
    ) -> EngineClient:
        if several and config.record_steps is not None:  # processes must not write to the same file
            config = msgspec.structs.replace(config, record_steps=f"{config.record_steps}.{name}")
        config = msgspec.structs.replace(config, engine=name)
        events = EngineCallbacks(
            on_step=partial(self._step, metrics),
            on_frames=self._record,
            on_ready=partial(self._ready, name, metrics),
            on_death=metrics.record_death,
            on_failure=partial(self._engine_failed, name),
            on_log_line=(lambda line: self._say(f"engine {name}: {line}")) if several else self._say,
        )
        return EngineClient(name, config, events)

    @property
    def info(self) -> EngineInfo | None:
        """What all ready engines have in common, to check requests against. None: no engine is ready."""
        known = [info for client in self.clients if (info := client.info) is not None]
        if len(known) < 2:
            return known[0] if known else None
        gaps = [info.gap_target for info in known if info.gap_target is not None]
        # The limits that every engine can serve, and can promise.
        return msgspec.structs.replace(
            known[0],
            max_model_len=min(info.max_model_len for info in known),
            gap_target=max(gaps, default=None),
            min_gap_target=max(info.min_gap_target for info in known),
        )

    @property
    def health(self) -> EngineHealth:
        """The health of the engine in the best state."""
        found = {client.health for client in self.clients}
        return next(health for health in EngineHealth if health in found)

    @property
    def failure(self) -> str | None:
        """Why no engine will be started again. None: one runs, or may be started."""
        reasons = [(client.name, client.failure) for client in self.clients if client.failure is not None]
        if len(reasons) < len(self.clients):
            return None
        if len({reason for _, reason in reasons}) == 1:
            return reasons[0][1]
        return "; ".join(f"engine {name}: {reason}" for name, reason in reasons)

    @property
    def load(self) -> EngineLoad:
        """The sum over all engines."""
        loads = [client.load for client in self.clients]
        return EngineLoad(*(sum(getattr(load, field.name) for load in loads) for field in fields(EngineLoad)))

    @property
    def ready(self) -> frozenset[str]:
        """The names of the engines that are ready."""
        return frozenset(client.name for client in self.clients if client.health is EngineHealth.READY)

    @property
    def pids(self) -> dict[str, int | None]:
        """The process ids of the engines, by name."""
        return {client.name: client.pid for client in self.clients}

    def start(self) -> None:
        with contextlib.suppress(OSError):
            remove_stale_folders()
        for client in self.clients:
            client.start()

    async def close(self) -> None:
        """Ends all engine processes. Requests that still run are lost."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def choose(self, prompts: Sequence[EnginePrompt] = ()) -> EngineClient:
        """A ready engine. If none is ready, any engine: a request waits there if it is silent, else it fails."""
        ready = [client for client in self.clients if client.health is EngineHealth.READY]
        return self._router.choose(ready or self.clients, prompts)

    def fail_requests(self, reason: str) -> None:
        """Ends all requests with an error."""
        for client in self.clients:
            client.fail_requests(reason)

    def reset_cache(self) -> None:
        for client in self.clients:
            client.reset_cache()

    def _step(self, metrics: EngineMetrics, step: EngineStep) -> None:
        metrics.record_step(step)
        if step.starved and self._metrics.starved_steps == STARVED_STEPS:
            self._say(STARVED_WARNING)

    def _ready(self, name: str, metrics: EngineMetrics, info: EngineInfo) -> str | None:
        self._first = self._first or (name, info)
        if reason := _difference(info, self._first[1]):
            return f"its {reason} in engine {self._first[0]}"
        metrics.record_start(info.block_size, info.num_blocks)
        self._record_start(name, info)
        self.changed.set()
        return None

    def _record(self, prompts: list[bytes], step: bytes) -> None:
        """Adds the frames of one message of an engine to the recording."""
        now = clock()
        for frame in prompts:
            self._recording.add(frame, "prompt", now)
        if step:
            self._recording.add(step, "step", now)

    def _record_start(self, name: str, info: EngineInfo) -> None:
        now = clock()
        frame = EngineFrame(
            engine=name,
            time=now,
            epoch=time.time(),
            weft=__version__,
            model=self._metrics.model_name,
            device=info.device,
            policy=info.policy,
            gap_target=info.gap_target,
            gap_promised=info.gap_source > Source.DEFAULT,
            ttft_target=info.ttft_target,
            ttft_target_per_1k=info.ttft_target_per_1k,
            ttft_promised=info.ttft_source > Source.DEFAULT,
            max_num_seqs=info.max_num_seqs,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            enable_prefix_caching=info.enable_prefix_caching,
            max_num_batched_tokens=info.max_num_batched_tokens,
            profile=info.profile,
        )
        self._recording.add_engine(name, encode_frame(frame), now)

    def _engine_failed(self, name: str) -> None:
        if self.failure is None:  # otherwise the server exits and prints the reason
            reason = next(client.failure for client in self.clients if client.name == name)
            self._say(f"engine {name} has failed and is not started again: {reason}")
        self.changed.set()


def _difference(info: EngineInfo, other: EngineInfo) -> str | None:
    """A field that must be equal for both but is not, with both values. None: all are equal."""
    for field in COMMON:
        value, expected = getattr(info, field), getattr(other, field)
        if value != expected:
            return f"{field} is {value}, but {expected}"
    return None
