"""An engine in virtual time: the real loop and the real scheduler on a simulated device."""

import math
from typing import NamedTuple

from weft.core import CostModel, Scheduler, StepPlan, Targets, slo
from weft.engine.calibration import Calibration
from weft.engine.engine import Engine, Promises
from weft.engine.executor import StepInputs, StepMasks, StepResult
from weft.engine.loop import Loop
from weft.sim.profiles import Profile
from weft.sim.simulator import Truth


class VirtualExecutor:
    """An executor that always samples the same token. Its clock advances when a result is requested."""

    class Pending(NamedTuple):
        executor: "VirtualExecutor"
        outcome: StepResult

        def result(self) -> StepResult:
            self.executor.now = self.outcome.finished
            return self.outcome

    def __init__(self, truth: Truth) -> None:
        self.now = 0.0  # seconds
        self._free = 0.0  # end of the last submitted step
        self._seconds = truth.clock()

    def submit(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None = None) -> Pending:
        started = max(self.now, self._free)
        self._free = started + self._seconds(plan.shape, started - self._free)
        return self.Pending(self, StepResult([1] * int(plan.samples.sum()), started, self._free))

    def close(self) -> None:
        pass


def virtual_engine(profile: Profile, truth: Truth) -> Engine:
    scheduler = Scheduler(
        wave=profile.coefficients.wave,
        policy=slo(CostModel(profile.coefficients), profile.max_num_batched_tokens),
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
    )
    executor = VirtualExecutor(truth)
    known = Calibration(profile.coefficients, 0.0, 0.05, 0.0, 0.0, 0, profile.max_num_batched_tokens, profile.name)
    return Engine(
        Loop(scheduler, executor, clock=lambda: executor.now),
        vocab_size=1 << 16,
        eos_ids=(),
        max_model_len=profile.max_model_len,
        seed=0,
        promises=Promises(Targets(gap=math.inf), calibration=known),
    )
