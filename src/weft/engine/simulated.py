"""SimulatedExecutor: an executor in virtual time. It computes nothing; a step takes the time that it is told."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from weft.core import HostCost, StepBatch, StepShape
from weft.core.host_cost import IDLE_S, WAKING_S
from weft.engine.executor import Bytes, DeviceMemory, ExecutorFacts, StepInputs, StepMasks, StepResult
from weft.kv.spec import KVLayout, KVSpec

VIRTUAL_LAYOUT = KVLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=1, dtype="float32")
VIRTUAL_FACTS = ExecutorFacts(
    "virtual", "virtual", VIRTUAL_LAYOUT, vocab_size=1 << 16, dtypes="none", prepares_ahead=True
)
SAMPLED_TOKEN = 1  # what every row samples


class VirtualClock:
    """A clock that moves only when it is set."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds

    def __call__(self) -> float:
        return self.now


class SimulatedExecutor:
    """Runs one step after the other on a device of virtual time. The clock moves when a result is asked for.

    `seconds` gives the time of a step: from its shape and the idle seconds of the device before it. `host` is the
    host's time of a step, which the clock is charged with. Blocks hold what was written into them, else zeros.
    """

    def __init__(
        self,
        clock: VirtualClock,
        seconds: Callable[[StepShape, float], float] = lambda shape, idle: 0.0,
        host: HostCost | None = None,
        facts: ExecutorFacts = VIRTUAL_FACTS,
    ) -> None:
        self.clock, self.facts = clock, facts
        self.calls = 0  # steps submitted and results taken
        self._seconds = seconds
        self._host = host or HostCost()
        self._device_free = 0.0  # end of the last submitted step
        self._awake = WAKING_S  # steps that start before this time take longer, because of an idle period before
        self._blocks: dict[int, Bytes] = {}

    def measure_memory(self) -> DeviceMemory:
        """Returns unlimited memory: a virtual KV cache takes none."""
        return DeviceMemory(total=1 << 60, free=1 << 60, reserved=0)

    def allocate_kv_cache(self, spec: KVSpec) -> None:
        self._blocks.clear()

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Does nothing: all steps take the time that they are told."""

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> "SimulatedStep":
        self.calls += 1
        clock = self.clock
        clock.now += self._host.submit_seconds(len(batch.slots), batch.shape.slices > 0)
        started = max(clock.now, self._device_free)
        idle = started - self._device_free
        if idle > IDLE_S:
            self._awake = started + WAKING_S
        slow = 1 + self._host.wake if started < self._awake else 1.0
        self._device_free = started + slow * self._seconds(batch.shape, idle)
        tokens = [SAMPLED_TOKEN] * np.count_nonzero(batch.is_sampled)
        return SimulatedStep(self, StepResult(tokens, started, self._device_free))

    def read_blocks(self, blocks: Sequence[int]) -> "SimulatedRead":
        empty = np.zeros(self.facts.layout.block_bytes, np.uint8)
        return SimulatedRead(np.stack([self._blocks.get(block, empty) for block in blocks]))

    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> "SimulatedWrite":
        self._blocks.update(zip(blocks, data.copy(), strict=True))
        return SimulatedWrite()

    def fill_kv_cache_with_noise(self) -> None:
        """Does nothing: no step reads the blocks."""

    def close(self) -> None:
        """Does nothing: there are no threads and no devices."""

    def wait_for(self, result: StepResult) -> StepResult:
        """Moves the clock to the end of the step, and returns its result."""
        self.calls += 1
        self.clock.now = max(self.clock.now, result.finished) + self._host.commit
        return result


class SimulatedStep(NamedTuple):
    executor: SimulatedExecutor
    step_result: StepResult

    def result(self) -> StepResult:
        return self.executor.wait_for(self.step_result)


class SimulatedRead(NamedTuple):
    data: Bytes

    def result(self) -> Bytes:
        return self.data


class SimulatedWrite(NamedTuple):
    def result(self) -> None:
        return None
