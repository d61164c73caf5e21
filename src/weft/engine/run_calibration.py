"""`calibrate` runs real steps on the real executor for a few seconds and fits the cost model's coefficients to them.

The survey has three phases. It grows steps in every direction until they cost too much. It draws random mixes within
that range. It repeats all of them in random order until the time is over. Then requests are served for a while (see
rehearsal.py), and their steps count as much as the survey's. The error of the cost model is estimated on steps that
were held out from the fit.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from weft.engine.calibration import Calibration
from weft.engine.executor import Executor
from weft.engine.mix_runner import MixRunner
from weft.engine.rehearsal import BURSTS, FULL_STEPS, LONE_SEQUENCE, PHASES, rehearse
from weft.engine.residuals import fit_residuals
from weft.engine.step_mix import StepLimits
from weft.engine.survey import Survey

REHEARSAL_SHARE = 1.0  # time of the rehearsal, as a share of the measuring time, added to it
FULL_REHEARSAL_SHARE = 1.6  # the same, if very full steps are rehearsed too
BURST_REHEARSAL_SHARE = 0.8  # the same, for bursts


def calibrate(
    executor: Executor,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    seconds: float = 5.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Measures single steps for about `seconds`, after a warm-up, then rehearses service for as long (if the executor
    prepares steps ahead, for 2.4 times as long). The executor must be idle, and its KV cache is overwritten.

    An executor that prepares a step while the previous step runs (`prepares_ahead`, a GPU) is kept busy all the time,
    as under load: the host's part of a step takes no time, and a device at its power limit is slower (an H200 by 5 to
    9%). Its KV cache is filled before, so that each row can read a different context. (Shared blocks would come from
    the device's caches, which is not so in service.) `progress` is called with the share of `seconds` that has passed.
    On return nothing is in flight. Slots and block tables keep old entries; batches overwrite them when they assign
    them.
    """
    facts = executor.facts
    if facts.prepares_ahead:
        executor.fill_kv_cache_with_noise()  # takes a GPU less than a second
    bounds = StepLimits(
        rows=min(max_num_seqs, max(1, num_blocks // 2)),
        blocks=num_blocks,
        block_size=block_size,
        length=max_model_len,
        tokens=max_num_batched_tokens,
    )
    runner = MixRunner(executor, bounds, facts.vocab_size, facts.prepares_ahead, is_filled=facts.prepares_ahead)
    survey = Survey(runner, facts.grain, facts.wave, seconds, progress)
    survey.explore()
    survey.repeat()
    # With `prepares_ahead` the device is a GPU, and its clock is not the host's.
    wake = 0.0 if facts.prepares_ahead else survey.wake()
    survey.runner.finish()
    perform = partial(
        rehearse,
        executor,
        max_num_seqs=min(max_num_seqs, bounds.rows),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        speed=survey.prefill_speed(),
    )
    if not facts.prepares_ahead:
        return survey.conclude(
            facts.device, perform(phases=(LONE_SEQUENCE, *PHASES), seconds=REHEARSAL_SHARE * seconds), wake
        )
    # Without the lone sequence: a lightly used GPU is faster than one at its power limit, and the scheduler must expect
    # the latter. Residuals also use bursts, in which the GPU's clock rises and falls. A CPU gets no residuals: other
    # work disturbs its steps more.
    served = perform(phases=(*PHASES, *FULL_STEPS), seconds=FULL_REHEARSAL_SHARE * seconds)
    found = survey.conclude(facts.device, served, wake)
    bursts = perform(phases=BURSTS, seconds=BURST_REHEARSAL_SHARE * seconds)
    return replace(found, residuals=fit_residuals(found.coefficients, [*served, *bursts]))
