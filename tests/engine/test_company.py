"""A request's tokens do not depend on its company: on a real model, in float64, where rounding cannot flip a token."""

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.company import BLOCK, Arrival, Case, assert_it_really_happened, cases, play
from tests.engine.tiny import tiny_directory
from weft.core import Scheduler
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.stream import Standing, Stream
from weft.engine.torch_executor import TorchExecutor
from weft.kv import KVPool
from weft.models import CausalLM, load_config, load_model

CPU = torch.device("cpu")
# By seed; None is greedy. Everything that a neighbour might disturb is in one of them.
WISHES: dict[int | None, SamplingParams] = {
    None: SamplingParams(temperature=0),
    0: SamplingParams(seed=0),
    1: SamplingParams(seed=1, temperature=0.8, top_p=0.9, min_p=0.02, logprobs=2),
    2: SamplingParams(seed=2, top_k=9, repetition_penalty=1.3, logit_bias={5: 2.0}),
    3: SamplingParams(seed=3, frequency_penalty=0.7, presence_penalty=0.4, min_tokens=3, prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path: Path = tiny_directory(tmp_path_factory.mktemp("tiny"))
    config = load_config(path)
    return load_model(path, config, dtype=torch.float64, device=CPU, max_model_len=128, load_format="dummy", seed=1)


def open_stream(name: str, arrival: Arrival, now: float) -> Stream:
    return Stream.open(
        name,
        np.array(arrival.prompt, np.int32),
        WISHES[arrival.seed],
        seed=arrival.seed or 0,
        max_tokens=arrival.max_tokens,
        eos_ids=(0, 7, 13),
        root=root_hash(arrival.salt),
        hashes=prompt_hashes(root_hash(arrival.salt), np.array(arrival.prompt, np.int32), BLOCK),
        arrival=now,
        standing=arrival.standing,
    )


def torch_loop(model: CausalLM, case: Case) -> Loop:
    config = model.config
    kv = KVPool(
        num_layers=config.num_layers,
        num_blocks=case.num_blocks,
        block_size=BLOCK,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float64,
        device=CPU,
    )
    scheduler = Scheduler(
        policy=case.policy,
        num_blocks=case.num_blocks,
        block_size=BLOCK,
        max_num_seqs=case.seqs,
        enable_prefix_caching=case.caching,
    )
    executor = TorchExecutor(
        model, kv, slots=scheduler.slots.size, max_model_len=128, vocab_size=config.vocab_size, device=CPU
    )
    return Loop(scheduler, executor, depth=case.depth)


def test_company_never_changes_tokens(model: CausalLM) -> None:
    seen: Counter[str] = Counter()

    @cache
    def alone(prompt: tuple[int, ...], max_tokens: int, seed: int | None) -> list[int]:
        arrival = Arrival(0, prompt, max_tokens, Standing(), "", seed, None)
        loop = torch_loop(model, Case((arrival,), depth=0, budget=64, seqs=1, spare=0, caching=False, by_slack=False))
        stream = open_stream("alone", arrival, 0.0)
        loop.add(stream)
        while loop.has_work:
            loop.step()
        loop.executor.close()
        return stream.output

    @settings(max_examples=200, deadline=None)
    @given(cases)
    def plays(case: Case) -> None:
        loop = torch_loop(model, case)
        try:
            play(case, loop, open_stream, lambda a: alone(a.prompt, a.max_tokens, a.seed), seen)
        finally:
            loop.executor.close()

    plays()
    assert_it_really_happened(seen)
