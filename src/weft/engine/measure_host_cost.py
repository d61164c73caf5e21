"""Measures the host time of steps: runs the real loop and scheduler on an executor that takes no time."""

import time
from typing import NamedTuple

import numpy as np

from weft.core import CostModel, HostCost, Request, Scheduler, slo
from weft.core.admission import DeadlineAdmission
from weft.core.budget import StepLoad
from weft.core.coefficients import Coefficients
from weft.core.forecast import FORECAST_GROUPS, PendingPrefill, PromptRows
from weft.core.lineup import Lineup
from weft.core.shape import decodes_alone
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.sequence import Sequence
from weft.engine.simulated import SimulatedExecutor, VirtualClock

FEW_ROWS, MANY_ROWS = 16, 128
MEASURED_STEPS = 60  # to measure
BLOCK_SIZE = 16
PROMPT_TOKENS = 500  # of an ordinary prompt
# Time of the API process to send a token, divided by the loop's time for a row of a step. Both are Python, so the ratio
# is about the same on every machine (`weft bench streams` and `weft bench scheduler` measure the two).
API_ROWS_PER_TOKEN = 50.0


class SubmitTimes(NamedTuple):
    """Median seconds that the real executor takes to submit a step."""

    decode: float = 0.0  # without prefill slices
    prefill: float = 0.0  # with them


def measure_host_cost(cost: Coefficients, submit: SubmitTimes, wake: float, *, is_served: bool) -> HostCost:
    """Measures the host cost. `wake` is from the calibration. `is_served`: an API process sends tokens to clients."""
    few, many = _step_seconds(FEW_ROWS, cost), _step_seconds(MANY_ROWS, cost)
    row = max(0.0, many.step - few.step) / (MANY_ROWS - FEW_ROWS)
    step = max(0.0, few.step - FEW_ROWS * row)
    return HostCost(
        step=step + submit.decode,
        row=row,
        prefill=max(0.0, few.prefill - few.step) + max(0.0, submit.prefill - submit.decode),
        commit=step / 4,
        token=API_ROWS_PER_TOKEN * row if is_served else 0.0,
        arrival=_arrival(),
        visit=_visit(cost),
        wake=wake,
    )


class _LoopSeconds(NamedTuple):
    step: float  # seconds of the loop for a step of decodes alone
    prefill: float  # seconds of the loop for a step with a prompt


def _step_seconds(rows: int, cost: Coefficients) -> _LoopSeconds:
    scheduler = Scheduler(
        policy=slo(CostModel(cost), 8192),
        num_blocks=4096,
        block_size=BLOCK_SIZE,
        max_num_seqs=rows + MEASURED_STEPS + 1,
    )
    loop = Loop(scheduler, SimulatedExecutor(VirtualClock()))
    for number in range(rows):
        loop.add(_sequence(number, 4 * MEASURED_STEPS))
    while scheduler.num_waiting:
        loop.step()
    decode = [_time_step(loop) for _ in range(MEASURED_STEPS)]
    prefill = []
    for number in range(MEASURED_STEPS // 4):
        loop.add(_sequence(rows + number, 1))
        prefill.append(_time_step(loop))
        _time_step(loop)
    return _LoopSeconds(_p20(decode), _p20(prefill))


def _time_step(loop: Loop) -> float:
    started = time.perf_counter()
    loop.step()
    return time.perf_counter() - started


def _arrival() -> float:
    seconds = []
    for number in range(16):
        started = time.perf_counter()
        _sequence(number, 1, PROMPT_TOKENS)
        seconds.append(time.perf_counter() - started)
    return _p20(seconds)


def _visit(cost: Coefficients) -> float:
    """Seconds of screening new requests, per queue entry that it visits."""
    policy = slo(CostModel(cost), 8192)
    assert isinstance(policy.admission, DeadlineAdmission)
    requests = [
        Request(f"{number:03d}", PROMPT_TOKENS, 100, ttft_target=3600.0, gap_target=60.0) for number in range(32)
    ]
    for request in requests:
        request.order_key = policy.order.key(request)
        request.forecast_row = PendingPrefill(request, 0, PROMPT_TOKENS).pack()
    rows = PromptRows.of([request.forecast_row for request in requests])
    lineup = Lineup(requests, np.arange(len(requests)), rows, list(range(len(requests))))
    load = StepLoad(0.0, decodes_alone(64, 64 * PROMPT_TOKENS), 60.0)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        policy.admission.screen(requests, lambda newcomers: lineup, load, FORECAST_GROUPS)
        seconds.append(time.perf_counter() - started)
    # Besides the forecast, each new request is looked up in the prefix cache and queued: about the same time again.
    return 2 * _p20(seconds) / (len(requests) + FORECAST_GROUPS)


def _p20(seconds: list[float]) -> float:
    """The 20th percentile: excludes other work of the machine, because noise only makes steps slower."""
    return float(np.percentile(seconds, 20))


def _sequence(number: int, max_tokens: int, prompt_tokens: int = BLOCK_SIZE) -> Sequence:
    prompt = np.full(prompt_tokens, number % 1000, np.int32)
    root = root_hash()
    return Sequence.create(
        f"{number:09d}",
        prompt,
        SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        eos_ids=(),
        root=root,
        hashes=prompt_hashes(root, prompt, BLOCK_SIZE),
        arrival=0.0,
    )
