"""What crosses the step boundary, as bytes: every batch of random runs is encoded, decoded and then executed."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.company import Arrival, Case, cases, play, repeat_until
from tests.engine.test_company import ENDS, WISHES, open_stream, torch_loop
from tests.engine.tiny import tiny_directory, write_letters
from tests.strength import examples
from weft.core import BlockUpdates, StepBatch, StepShape
from weft.engine import wire
from weft.engine.executor import Executor, StepInputs, StepMasks, StepResult
from weft.engine.sequence import SchedulingParams, Sequence
from weft.engine.structured import Grammars
from weft.models import CausalLM, Dtypes, load_config, load_model


class Recoded:
    """An executor that gets, and gives, only what came out of bytes."""

    def __init__(self, executor: Executor, seen: Counter[str]) -> None:
        self.executor, self.seen, self.facts = executor, seen, executor.facts

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> Any:
        self.seen["steps"] += 1
        self.seen["masks"] += masks is not None
        self.seen["set-ups"] += len(inputs.setups)
        found = None if masks is None else again(masks, StepMasks)
        return Pending(self.executor.submit(again(batch, StepBatch), again(inputs, StepInputs), found), self.seen)

    def close(self) -> None:
        self.executor.close()


class Pending:
    def __init__(self, pending: Any, seen: Counter[str]) -> None:
        self.pending, self.seen = pending, seen

    def result(self) -> StepResult:
        found: StepResult = again(self.pending.result(), StepResult)
        self.seen["log probabilities"] += bool(found.logprobs)
        self.seen["log probabilities of prompts"] += bool(found.prompt_logprobs)
        return found


def again(message: Any, kind: Any) -> Any:
    return wire.decode(wire.encode(message), kind)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tiny_directory(tmp_path_factory.mktemp("tiny")), ENDS)


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    dtypes = Dtypes.of(torch.float64)
    return load_model(
        path, load_config(path), dtypes=dtypes, device=torch.device("cpu"), max_model_len=128, load_format="dummy"
    )


def test_steps_that_went_through_bytes_give_the_same_tokens(model: CausalLM, path: Path) -> None:
    seen: Counter[str] = Counter()
    grammars = Grammars(path, model.config.vocab_size, ENDS)

    def opened(name: str, arrival: Arrival, now: float) -> Sequence:
        wish = WISHES[arrival.seed].structured_outputs
        return open_stream(name, arrival, now, None if wish is None else grammars.compile(wish)[0])

    def alone(arrival: Arrival) -> list[int]:
        """Without the detour, and without company."""
        only = Arrival(0, arrival.prompt, arrival.max_tokens, SchedulingParams(), "", arrival.seed, None)
        loop = torch_loop(model, Case((only,), depth=0, budget=64, seqs=1, spare=0, caching=False, by_slack=False))
        stream = opened("alone", only, 0.0)
        loop.add(stream)
        while loop.has_work:
            loop.step()
        loop.close()
        return stream.output

    @settings(max_examples=examples(40), deadline=None)
    @given(cases)
    def plays(case: Case) -> None:
        loop = torch_loop(model, case)
        loop.executor = Recoded(loop.executor, seen)  # type: ignore[assignment]
        try:
            play(case, loop, opened, alone, seen)
        finally:
            loop.close()

    wanted = ("steps", "masks", "set-ups", "log probabilities", "log probabilities of prompts")
    repeat_until(lambda: all(seen[what] >= 5 for what in wanted), plays)
    for what in wanted:
        assert seen[what] >= 5, f"only {seen[what]} {what}"


def test_arrays_keep_their_types_and_shapes() -> None:
    empty = np.empty(0, np.int64)
    batch = StepBatch(
        number=7,
        slots=np.array([3, 1]),
        first=np.array([2**40, 0]),
        count=np.array([1, 9]),
        is_sampled=np.array([True, False]),
        num_decodes=1,
        shape=StepShape(tokens=10, pairs=45.0, slices=1, decodes=1, context=8, reach=9.5),
        new_blocks=BlockUpdates(empty, empty, empty),
    )
    found = again(batch, StepBatch)
    for name in ("slots", "first", "count", "is_sampled"):
        mine, other = getattr(batch, name), getattr(found, name)
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
    assert found.shape == batch.shape
    assert [len(part) for part in found.new_blocks] == [0, 0, 0]
    masks = again(StepMasks(np.array([1]), np.array([[-1, 7]], np.int32)), StepMasks)
    assert masks.bits.shape == (1, 2)
    masks.bits[0, 0] = 0  # it can be written to


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"]), np.array([1 + 2j])])
def test_only_arrays_of_numbers_are_received(array: Any) -> None:
    data = wire.encode(StepMasks(np.array([0]), np.array([[0]], np.int32)))
    kind = array.dtype.str.encode()
    forged = data.replace(b"\xa3<i4", bytes([0xA0 + len(kind)]) + kind)
    assert forged != data
    with pytest.raises(ValueError, match="not an array of numbers"):
        wire.decode(forged, StepMasks)
