"""The GPU's executor against the CPU's, where there is no GPU: its kernels run in Triton's interpreter, and doubles of
graphs run their steps again. `pytest tests/gpu` does the same, and more, on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import weft
from tests.engine.tiny import write_letters
from tests.kernels.device import DEVICE, Moment
from tests.kernels.graph_double import FullGraphDouble, PiecewiseGraphDouble, launches_on_tape
from tests.models import tiny
from weft import SamplingParams, StructuredOutputs
from weft.core.slots import Slots
from weft.engine import cuda_executor, staging
from weft.kernels.attention import Attend
from weft.kernels.cuda import PlainPrefills
from weft.kv.pool import KVPool
from weft.kv.spec import KVSpec
from weft.models import CausalLM

pytestmark = [
    pytest.mark.skipif(DEVICE.type == "cuda", reason="tests/gpu has this for a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),
]

SEQS, CONTEXT, BUDGET = 5, 40, 16  # of 16 tokens a step: prompts are cut into slices, which share steps with decodes
LENGTHS = (3, 19, 26, 5)


@contextmanager
def _abridged(model: CausalLM) -> Iterator[None]:
    FullGraphDouble.is_warm_up = True
    try:
        with ABRIDGED(model):
            yield
    finally:
        FullGraphDouble.is_warm_up = False


ABRIDGED = CausalLM.abridged


@pytest.fixture(scope="module", autouse=True)
def _device_of_paper() -> Iterator[None]:
    def pinned(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32)

    with pytest.MonkeyPatch.context() as monkeypatch, launches_on_tape():
        for module in (staging, cuda_executor):
            monkeypatch.setattr(module, "pinned", pinned)
        monkeypatch.setattr(cuda_executor, "FullGraph", FullGraphDouble)
        monkeypatch.setattr(cuda_executor, "PiecewiseGraph", PiecewiseGraphDouble)
        monkeypatch.setattr(CausalLM, "abridged", _abridged)
        monkeypatch.setattr(cuda_executor, "warm_up", lambda step: step())
        monkeypatch.setattr(cuda_executor, "sm_count", lambda device: 3)
        monkeypatch.setattr(cuda_executor, "sampling_sizes", lambda most: [3, most])  # more than some steps have
        for name, value in {
            "Event": Moment,
            "current_stream": lambda device: Moment(),
            "synchronize": lambda device=None: None,
            "graph_pool_handle": lambda: (0, 0),
            "mem_get_info": lambda device=None: (1 << 30, 1 << 31),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        yield


class Engines(NamedTuple):
    cpu: weft.LLM
    gpu: weft.LLM


@pytest.fixture(scope="module")
def engines(_device_of_paper: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The same model on both executors. Graphs are compared with their capture, so nothing may change behind it."""
    path = tmp_path_factory.mktemp("model")
    tiny.save(tiny.llama(num_hidden_layers=4, eos_token_id=0), path)  # of four layers, a warm-up runs three
    write_letters(path, (0,))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(FullGraphDouble, "is_exact", True)
        with _engine(path, gpu=False) as cpu, _engine(path, gpu=True) as gpu:
            yield Engines(cpu, gpu)


@contextmanager
def _engine(path: Path, *, gpu: bool, captured: bool = True, **limits: int) -> Iterator[weft.LLM]:
    options = {"max_model_len": CONTEXT, "max_num_seqs": SEQS, "max_num_batched_tokens": BUDGET, **limits}
    with weft.LLM(path, device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 20, **options) as llm:
        if gpu:
            _replace_executor(llm, options, captured=captured)
        yield llm


def _tokens(llm: weft.LLM, kinds: list[dict[str, Any]]) -> list[list[int]]:
    prompts = [tiny.prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    common = {"temperature": 0.8, "max_tokens": 6, "ignore_eos": True}
    params = [SamplingParams(**{**common, "seed": seed, **kind}) for seed, kind in enumerate(kinds)]
    return [result.token_ids for result in llm.generate(prompts, params, progress=False)]


def _replace_executor(llm: weft.LLM, options: dict[str, int], *, captured: bool) -> None:
    """As `build_engine` would make it."""
    loop = llm.engine.loop
    model, blocks = loop.executor.model, loop.scheduler.num_blocks  # type: ignore[attr-defined]
    seqs, budget = options["max_num_seqs"], options["max_num_batched_tokens"]
    limits = cuda_executor.Limits(seqs, budget, CONTEXT, Slots.size_for(seqs))
    executor = cuda_executor.CudaExecutor(model, limits, block_size=16, device=torch.device("cpu"))
    if not captured:
        executor.capture = lambda **options: None  # type: ignore[method-assign]
    memory = executor.measure_memory()
    assert memory.reserved > executor.later_bytes
    executor.allocate_kv_cache(KVSpec(executor.facts.layout, blocks))
    executor.warm_up()
    if not captured:
        del executor.capture
    loop.executor = executor


GREEDY: list[dict[str, Any]] = [{"temperature": 0}] * 4
CUTS: list[dict[str, Any]] = [{"top_p": 0.7}, {}, {"top_k": 5, "min_p": 0.01}, {"top_k": 8, "top_p": 0.8}]
EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": {5: 3.0, 9: -100.0}, "top_p": 0.9},
    {"temperature": 0},
    {"min_tokens": 3, "stop_token_ids": [7, 8, 9]},
]
IN_TURN: list[dict[str, Any]] = [{"max_tokens": 2}, {"max_tokens": 4, "top_k": 3}, {"presence_penalty": 1.0}, {}]


def test_tokens_are_those_of_the_cpu(engines: Engines) -> None:
    """Steps of all kinds one after the other, so that what one leaves behind lies in the way of the next."""
    for kinds in (GREEDY, CUTS, EDITS, IN_TURN):
        assert _tokens(engines.gpu, kinds) == _tokens(engines.cpu, kinds)


def test_tokens_of_steps_without_graphs_are_those_of_the_cpu(tmp_path: Path) -> None:
    tiny.save(tiny.llama(num_hidden_layers=2), tmp_path)
    with _engine(tmp_path, gpu=False) as cpu, _engine(tmp_path, gpu=True, captured=False) as gpu:
        for kinds in (CUTS, IN_TURN):
            assert _tokens(gpu, kinds) == _tokens(cpu, kinds)


def test_embeddings_are_those_of_the_cpu(engines: Engines) -> None:
    prompts = [tiny.prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    for pooling in ("last", "mean"):
        found, expected = (llm.embed(prompts, pooling=pooling, progress=False) for llm in (engines.gpu, engines.cpu))
        for one, other in zip(found, expected, strict=True):
            assert np.abs(one.vector - other.vector).max() < 1e-4


def test_masks_reach_their_rows(engines: Engines) -> None:
    """Beside rows without one, with edits of other kinds, and in steps of graphs for more rows."""
    letters, digits = (StructuredOutputs(regex=f"[{kind}]{{4,}}") for kind in ("a-m", "0-9"))
    kinds = [{"structured_outputs": letters}, {"top_k": 5}, {"structured_outputs": digits, "top_p": 0.8}, *EDITS[:1]]
    found = _tokens(engines.gpu, kinds)
    assert found == _tokens(engines.cpu, kinds)
    for row, allowed in ((0, range(1, 14)), (2, range(27, 37))):  # token 0 is the end
        assert len(found[row]) >= 4
        assert set(found[row][:4]) <= set(allowed)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_families(name: str, tmp_path: Path) -> None:
    """Norms of heads, windows, norms that the kernels do not know."""
    tiny.save(tiny.FAMILIES[name](), tmp_path)
    captured = name == "gemma3"  # the other, to be quick, is not
    with _engine(tmp_path, gpu=False) as cpu, _engine(tmp_path, gpu=True, captured=captured) as gpu:
        assert _tokens(gpu, GREEDY) == _tokens(cpu, GREEDY)


@pytest.mark.parametrize(
    ("budget", "seqs", "largest"), [(24, 5, 24), (CONTEXT * 2 + 3, 5, CONTEXT * 2 + 3), (512, 3, 3 * (CONTEXT - 1))]
)
def test_the_largest_step_is_run_before_memory_is_given_away(
    budget: int, seqs: int, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whatever prompts it takes. A prompt has at most CONTEXT - 1 tokens: one more is sampled behind it."""
    tiny.save(tiny.llama(num_hidden_layers=1), tmp_path)
    monkeypatch.setattr(cuda_executor, "mixed_sizes", lambda most, parameters: [min(most, 4)])
    monkeypatch.setattr(cuda_executor, "decode_sizes", lambda most: [most])
    sizes: list[int] = []
    before: list[int] = []
    forward, use = CausalLM.forward, cuda_executor.CudaExecutor._replace_kv_pool

    def counted(self: CausalLM, token_ids: Tensor, attend: Attend) -> Tensor:
        sizes.append(len(token_ids))
        return forward(self, token_ids, attend)

    def used(self: cuda_executor.CudaExecutor, spec: KVSpec) -> None:
        before.append(len(sizes))
        use(self, spec)

    class Legal(PlainPrefills):
        def __init__(self, kv: KVPool, tables: Tensor, *slices: NDArray[np.int64]) -> None:
            slots, first, count = slices
            assert len(slots) <= seqs
            assert max(first + count) < CONTEXT
            super().__init__(kv, tables, *slices)

    monkeypatch.setattr(CausalLM, "forward", counted)
    monkeypatch.setattr(cuda_executor.CudaExecutor, "_replace_kv_pool", used)
    monkeypatch.setattr(cuda_executor, "PlainPrefills", Legal)
    with _engine(tmp_path, gpu=True, max_num_batched_tokens=budget, max_num_seqs=seqs):
        assert max(sizes) == largest
        assert max(sizes[: before[-1]]) == largest  # before there was a pool for all
        assert sizes[-1] == largest  # what was given back with the first pool is taken again


def test_memory_that_is_taken_later_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(tiny.llama(num_hidden_layers=3), tmp_path)
    made: list[FullGraphDouble] = []
    init = FullGraphDouble.__init__

    def counted(self: FullGraphDouble, step: Callable[..., Any], pool: object) -> None:
        made.append(self)
        init(self, step, pool)

    with _engine(tmp_path, gpu=True, captured=False) as llm:
        executor = llm.engine.loop.executor
        assert isinstance(executor, cuda_executor.CudaExecutor)
        monkeypatch.setattr(FullGraphDouble, "__init__", counted)
        executor.capture()
        # Pieces of a pass over three layers are three graphs: one ends where a layer attends.
        graphs = sum(3 if isinstance(one, PiecewiseGraphDouble) else 1 for one in made)
        assert len(made) > len({type(one) for one in made}) == 2
        assert executor.later_bytes == executor.sampler.later_bytes + graphs * cuda_executor.GRAPH_BYTES
        assert executor.sampler.later_bytes == 5 * tiny.VOCAB * Slots.size_for(SEQS)
