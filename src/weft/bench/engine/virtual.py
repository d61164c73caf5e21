"""An engine in virtual time: the real loop and the real scheduler on a simulated device."""

import math

from weft.core import CostModel, Scheduler, Targets, slo
from weft.engine.calibration import Calibration
from weft.engine.engine import CalibratedTargets, Engine
from weft.engine.loop import Loop
from weft.engine.simulated import SimulatedExecutor, VirtualClock
from weft.sim.profiles import Profile
from weft.sim.simulator import Truth


def virtual_engine(profile: Profile, truth: Truth) -> Engine:
    scheduler = Scheduler(
        wave=profile.coefficients.wave,
        policy=slo(CostModel(profile.coefficients), profile.max_num_batched_tokens),
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
    )
    clock = VirtualClock()
    known = Calibration(profile.coefficients, 0.0, 0.05, 0.0, 0.0, 0, profile.max_num_batched_tokens, profile.name)
    return Engine(
        Loop(scheduler, SimulatedExecutor(clock, truth.clock()), clock=clock),
        vocab_size=1 << 16,
        eos_ids=(),
        max_model_len=profile.max_model_len,
        seed=0,
        calibrated_targets=CalibratedTargets(Targets(gap=math.inf), calibration=known),
    )
