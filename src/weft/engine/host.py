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
from weft.engine.simulated import SimulatedExecutor, VirtualClock
from weft.engine.stream import Stream

FEW, MANY = 16, 128  # rows
STEPS = 60
BLOCK = 16
PROMPT = 500  # tokens of an ordinary prompt
# Time of the API process to stream a token, divided by the loop's time for a row of a step. Both are Python, so the
# ratio is about the same on every machine (`weft bench streams` and `weft bench scheduler` measure the two).
API_TOKEN = 50.0


class SubmitTimes(NamedTuple):
    """Median seconds that the real executor takes to submit a step."""

    decode: float = 0.0  # without prefill slices
    prefill: float = 0.0  # with them


def measure_host(cost: Coefficients, submit: SubmitTimes, wake: float, *, is_served: bool) -> HostCost:
    """Measures the host cost. `wake` is from the calibration. `is_served`: an API process sends tokens to clients."""
    few, many = _steps(FEW, cost), _steps(MANY, cost)
    row = max(0.0, many.step - few.step) / (MANY - FEW)
    step = max(0.0, few.step - FEW * row)
    return HostCost(
        step=step + submit.decode,
        row=row,
        prefill=max(0.0, few.prefill - few.step) + max(0.0, submit.prefill - submit.decode),
        commit=step / 4,
        token=API_TOKEN * row if is_served else 0.0,
        arrival=_arrival(),
        visit=_visit(cost),
        wake=wake,
    )


class _Steps(NamedTuple):
    step: float  # seconds of the loop for a step of decodes alone
    prefill: float  # seconds of the loop for a step with a prompt


def _steps(rows: int, cost: Coefficients) -> _Steps:
    scheduler = Scheduler(
        policy=slo(CostModel(cost), 8192), num_blocks=4096, block_size=BLOCK, max_num_seqs=rows + STEPS + 1
    )
    loop = Loop(scheduler, SimulatedExecutor(VirtualClock()))
    for number in range(rows):
        loop.add(_stream(number, 4 * STEPS))
    while scheduler.num_waiting:
        loop.step()
    decode = [_seconds(loop) for _ in range(STEPS)]
    prefill = []
    for number in range(STEPS // 4):
        loop.add(_stream(rows + number, 1))
        prefill.append(_seconds(loop))
        _seconds(loop)
    return _Steps(_usual(decode), _usual(prefill))


def _seconds(loop: Loop) -> float:
    started = time.perf_counter()
    loop.step()
    return time.perf_counter() - started


def _arrival() -> float:
    taken = []
    for number in range(16):
        started = time.perf_counter()
        _stream(number, 1, PROMPT)
        taken.append(time.perf_counter() - started)
    return _usual(taken)


def _visit(cost: Coefficients) -> float:
    """Seconds of screening new requests, per queue entry that it visits."""
    policy = slo(CostModel(cost), 8192)
    assert isinstance(policy.admission, DeadlineAdmission)
    requests = [Request(f"{number:03d}", PROMPT, 100, ttft_target=3600.0, gap_target=60.0) for number in range(32)]
    for request in requests:
        request.order_key = policy.order.key(request)
        request.forecast_row = PendingPrefill(request, 0, PROMPT).pack()
    rows = PromptRows.of([request.forecast_row for request in requests])
    lineup = Lineup(requests, np.arange(len(requests)), rows, list(range(len(requests))))
    load = StepLoad(0.0, decodes_alone(64, 64 * PROMPT), 60.0)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        policy.admission.screen(requests, lambda newcomers: lineup, load, FORECAST_GROUPS)
        taken.append(time.perf_counter() - started)
    # Besides the forecast, each new request is looked up in the prefix cache and queued: about the same time again.
    return 2 * _usual(taken) / (len(requests) + FORECAST_GROUPS)


def _usual(seconds: list[float]) -> float:
    """The 20th percentile: excludes other work of the machine, because noise only makes steps slower."""
    return float(np.percentile(seconds, 20))


def _stream(number: int, max_tokens: int, prompt_tokens: int = BLOCK) -> Stream:
    prompt = np.full(prompt_tokens, number % 1000, np.int32)
    root = root_hash()
    return Stream.open(
        f"{number:09d}",
        prompt,
        SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
        eos_ids=(),
        root=root,
        hashes=prompt_hashes(root, prompt, BLOCK),
        arrival=0.0,
    )
