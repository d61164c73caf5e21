"""A request's tokens do not depend on its company: on a real model, in float64, where rounding cannot flip a token."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.company import (
    BLOCK,
    Arrival,
    Case,
    assert_it_really_happened,
    cases,
    has_really_happened,
    play,
    repeat_until,
)
from tests.engine.tiny import tiny_directory, write_letters
from tests.strength import examples
from weft.core import Scheduler
from weft.engine.cpu_executor import CpuExecutor
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams, StructuredOutputs
from weft.engine.sequence import SchedulingParams, Sequence
from weft.engine.structured import Grammars, RequestGrammar
from weft.kv.spec import KVSpec
from weft.models import CausalLM, Dtypes, load_config, load_model

CPU = torch.device("cpu")
# By seed; None is greedy. Everything that a neighbour might disturb is in one of them.
WISHES: dict[int | None, SamplingParams] = {
    None: SamplingParams(temperature=0),
    0: SamplingParams(seed=0),
    1: SamplingParams(seed=1, temperature=0.8, top_p=0.9, min_p=0.02, logprobs=2),
    2: SamplingParams(seed=2, top_k=9, repetition_penalty=1.3, logit_bias={5: 2.0}),
    3: SamplingParams(seed=3, frequency_penalty=0.7, presence_penalty=0.4, min_tokens=3, prompt_logprobs=1),
    4: SamplingParams(seed=4, temperature=1.5, structured_outputs=StructuredOutputs(regex="([a-f][0-9]{1,3}){5,}")),
    5: SamplingParams(seed=5, min_tokens=9, structured_outputs=StructuredOutputs(json={"type": "integer"})),
}
ENDS = (0, 7, 13)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tiny_directory(tmp_path_factory.mktemp("tiny")), ENDS)


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    config = load_config(path)
    dtypes = Dtypes.of(torch.float64)
    return load_model(path, config, dtypes=dtypes, device=CPU, max_model_len=128, load_format="dummy", seed=1)


def open_stream(name: str, arrival: Arrival, now: float, grammar: RequestGrammar | None) -> Sequence:
    return Sequence.create(
        name,
        np.array(arrival.prompt, np.int32),
        WISHES[arrival.seed],
        seed=arrival.seed or 0,
        max_tokens=arrival.max_tokens,
        eos_ids=ENDS,
        root=root_hash(arrival.salt),
        hashes=prompt_hashes(root_hash(arrival.salt), np.array(arrival.prompt, np.int32), BLOCK),
        arrival=now,
        scheduling=arrival.scheduling,
        grammar=grammar,
    )


def torch_loop(model: CausalLM, case: Case) -> Loop:
    scheduler = Scheduler(
        policy=case.policy,
        num_blocks=case.num_blocks,
        block_size=BLOCK,
        max_num_seqs=case.seqs,
        enable_prefix_caching=case.caching,
    )
    executor = CpuExecutor(model, block_size=BLOCK, slots=scheduler.slots.size, max_model_len=128, device=CPU)
    executor.allocate_kv_cache(KVSpec(executor.facts.layout, case.num_blocks))
    return Loop(scheduler, executor, depth=case.depth)


def test_company_never_changes_tokens(model: CausalLM, path: Path) -> None:
    seen: Counter[str] = Counter()
    grammars = Grammars(path, model.config.vocab_size, ENDS)
    structured: list[Sequence] = []

    def opened(name: str, arrival: Arrival, now: float) -> Sequence:
        wish = WISHES[arrival.seed].structured_outputs
        stream = open_stream(name, arrival, now, None if wish is None else grammars.compile(wish)[0])
        if wish is not None:
            structured.append(stream)
        return stream

    @cache
    def alone(prompt: tuple[int, ...], max_tokens: int, seed: int | None) -> list[int]:
        arrival = Arrival(0, prompt, max_tokens, SchedulingParams(), "", seed, None)
        loop = torch_loop(model, Case((arrival,), depth=0, budget=64, seqs=1, spare=0, caching=False, by_slack=False))
        stream = opened("alone", arrival, 0.0)
        loop.add(stream)
        while loop.has_work:
            loop.step()
        loop.close()
        return stream.output

    @settings(max_examples=examples(350), deadline=None)  # enough for the rare things below to happen
    @given(cases)
    def plays(case: Case) -> None:
        loop = torch_loop(model, case)
        try:
            play(case, loop, opened, lambda a: alone(a.prompt, a.max_tokens, a.seed), seen)
        finally:
            loop.close()

    def preempted() -> int:
        return sum(stream.request.preemptions for stream in structured)

    repeat_until(lambda: preempted() >= 5 and has_really_happened(seen), plays)
    assert_it_really_happened(seen)
    assert preempted() >= 5
    for stream in structured:
        assert not set(stream.output[:-1]) & {*ENDS, 60, 61, 62, 63}
