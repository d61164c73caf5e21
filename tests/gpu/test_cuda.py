"""The engine on a GPU against the engine on the CPU. `pytest tests/gpu` runs all that need one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import weft
from tests.engine.tiny import write_letters
from tests.models import tiny
from weft import SamplingParams, StructuredOutputs
from weft.bench.engine.shapes import shape_directory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = (3, 37, 60, 5)
TOKENS = 48
TIE = 1e-4  # the CPU's two best log probabilities this close excuse a different choice


def generate(
    path: Path, device: str, params: SamplingParams | list[SamplingParams], **options: Any
) -> list[weft.Generation]:
    prompts = [tiny.prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    # 24 tokens a step: the longer prompts are cut into slices, which share their steps with decodes.
    options = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24, **options}
    with weft.LLM(path, device=device, kv_cache_memory_bytes=32 << 20, **options) as llm:
        return llm.generate(prompts, params, progress=False)


def wrong_tokens(expected: list[weft.Generation], found: list[weft.Generation]) -> list[str]:
    """Differences that no tie excuses; behind one the two continue different texts."""
    wrong = []
    for mine, theirs in zip(expected, found, strict=True):
        pairs = zip(mine.token_ids, theirs.token_ids, strict=True)
        position = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if position is not None:
            assert mine.logprobs is not None
            best, second = sorted(mine.logprobs[position].top.values(), reverse=True)[:2]
            if best - second >= TIE:
                wrong.append(f"token {position}: {theirs.token_ids[position]} instead of {mine.token_ids[position]}")
    return wrong


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *tiny.ROPES])
def test_greedy_tokens_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    model = {**tiny.FAMILIES, **tiny.ROPES}[name]()
    tiny.save(model, tmp_path)
    described = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    expected = generate(tmp_path, "cpu", described, dtype="float32")
    assert wrong_tokens(expected, generate(tmp_path, "cuda", plain, dtype="float32")) == []
    found = generate(tmp_path, "cuda", described, dtype="float32")
    assert wrong_tokens(expected, found) == []
    for mine, theirs in zip(expected, found, strict=True):  # the first, before a tie may have led elsewhere
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        assert theirs.logprobs[0].logprob == pytest.approx(mine.logprobs[0].logprob, abs=1e-3)
        assert theirs.logprobs[0].top == pytest.approx(mine.logprobs[0].top, abs=1e-3)


PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 2.0},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "top_k and top_p": {"temperature": 0.9, "top_k": 8, "top_p": 0.8},
    "all cuts": {"temperature": 1.2, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "penalties and cuts": {"temperature": 1.0, "repetition_penalty": 1.2, "top_p": 0.8, "top_k": 12},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"temperature": 1.0, "logit_bias": {5: 3.0, 9: -100.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": [7]},
}


@pytest.mark.parametrize("name", PARAMS)
def test_seeded_tokens_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    """One uniform number decides a token on both, so that only rounding at a border can tell them apart."""
    tiny.save(tiny.llama(), tmp_path)
    params = SamplingParams(max_tokens=TOKENS, seed=11, **PARAMS[name])
    expected = [result.token_ids for result in generate(tmp_path, "cpu", params, dtype="float32")]
    found = [result.token_ids for result in generate(tmp_path, "cuda", params, dtype="float32")]
    assert sum(a == b for a, b in zip(expected, found, strict=True)) >= len(LENGTHS) - 1


def test_rows_of_all_kinds_share_steps(tmp_path: Path) -> None:
    """A graph draws for everybody, and the sampler then for all that are in a step with one that asks for more."""
    tiny.save(tiny.llama(), tmp_path)
    kinds = [PARAMS[name] for name in ("temperature", "top_p", "hot", "penalties")]
    params = [SamplingParams(max_tokens=TOKENS - 9 * index, seed=index, **kind) for index, kind in enumerate(kinds)]
    expected = [result.token_ids for result in generate(tmp_path, "cpu", params, dtype="float32")]
    found = [result.token_ids for result in generate(tmp_path, "cuda", params, dtype="float32")]
    assert sum(a == b for a, b in zip(expected, found, strict=True)) >= len(LENGTHS) - 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "phi3"])
def test_halves_run_through_every_path(name: str, dtype: str, tmp_path: Path) -> None:
    tiny.save(tiny.FAMILIES[name](), tmp_path)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=TOKENS, ignore_eos=True)
    first = generate(tmp_path, "cuda", params, dtype=dtype)
    again = generate(tmp_path, "cuda", params, dtype=dtype)
    assert [result.token_ids for result in first] == [result.token_ids for result in again]
    assert all(len(result.token_ids) == TOKENS for result in first)


WIDE: dict[str, Callable[[], Any]] = {  # heads that FlashInfer has kernels for
    "llama": lambda: tiny.llama(head_dim=128),
    "qwen3-moe": lambda: tiny.build("Qwen3Moe", head_dim=128, norm_topk_prob=True, **tiny.MOE),
}
PLAIN_NORMS: dict[str, Callable[[], Any]] = {  # of heads, which no kernel knows
    "gemma3": lambda: tiny.build("Gemma3", head_dim=128, layer_types=["full_attention"] * len(tiny.GEMMA_LAYERS)),
}


@pytest.mark.parametrize("name", WIDE)
def test_bfloat16_is_no_worse_than_plain_torch(name: str, tmp_path: Path) -> None:
    """Log probabilities of prompts, read in slices beside decodes, against float32. Plain torch is the reference
    model in bfloat16 on the same device, which reads each prompt whole."""
    tiny.save(WIDE[name](), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=0)

    def errors(found: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.abs(np.concatenate(found) - exact)

    def logprobs(device: str, dtype: str) -> list[NDArray[np.float64]]:
        results = generate(tmp_path, device, params, dtype=dtype)
        return [np.array([one.logprob for one in (result.prompt_logprobs or [])[1:]]) for result in results]

    exact = np.concatenate(logprobs("cpu", "float32"))
    plain, found = errors(plain_logprobs(tmp_path)), errors(logprobs("cuda", "bfloat16"))
    assert found.max() <= max(0.02 * float(exact.std()), plain.max())
    assert (found**2).mean() <= (plain**2).mean()


@pytest.mark.parametrize("name", [*WIDE, *PLAIN_NORMS])
def test_captured_steps_read_what_the_slices_before_them_wrote(name: str, tmp_path: Path) -> None:
    """The first token behind each prompt. Beside keys or values of others its probabilities would be others as well:
    bfloat16 alone is off by 0.1 or so."""
    tiny.save({**WIDE, **PLAIN_NORMS}[name](), tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    exact = generate(tmp_path, "cpu", params, dtype="float32")
    for mine, theirs in zip(exact, generate(tmp_path, "cuda", params, dtype="bfloat16"), strict=True):
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        expected, found = mine.logprobs[0].top, theirs.logprobs[0].top
        both = expected.keys() & found.keys()
        assert len(both) >= 15
        assert np.mean([(expected[token] - found[token]) ** 2 for token in both]) < 0.3**2


def plain_logprobs(path: Path) -> list[NDArray[np.float64]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to("cuda").eval()
    found = []
    for seed, length in enumerate(LENGTHS):
        tokens = torch.from_numpy(np.asarray(tiny.prompt(length, seed))).long().to("cuda")
        with torch.inference_mode():
            scores = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
        found.append(scores.gather(1, tokens[1:, None])[:, 0].double().cpu().numpy())
    return found


def test_a_structure_is_kept_to() -> None:
    pytest.importorskip("llguidance")
    with weft.LLM(device="cuda", max_num_seqs=8, max_model_len=512, kv_cache_memory_bytes=64 << 20) as llm:
        params = SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]{12}"), max_tokens=40)
        results = llm.generate(["Once upon a time", "The"], params, progress=False)
    assert all(len(result.text) == 12 and result.text.isdecimal() for result in results)


def test_steps_wait_for_nothing(tmp_path: Path) -> None:
    """Torch tells where the host waits for the device. Only `result` does, by an event, which is not told."""
    tiny.save(tiny.llama(), tmp_path)
    asked: list[list[dict[str, Any]]] = [
        [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.1}],
        [{}, {"logprobs": 3}, {"prompt_logprobs": 2, "top_p": 0.9}, {}],
        [
            {"repetition_penalty": 1.1},
            {"presence_penalty": 0.5, "top_p": 0.9},
            {"logit_bias": {5: 1.0}},
            {"min_tokens": 9},
        ],
    ]
    with weft.LLM(tmp_path, device="cuda", max_num_seqs=4, kv_cache_memory_bytes=32 << 20) as llm:
        for together in asked:
            _generate_twice_and_do_not_wait(llm, together)


def test_a_grammar_makes_no_step_wait(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    tiny.save(tiny.llama(eos_token_id=0), tmp_path)
    write_letters(tmp_path, (0,))
    grammar = {"structured_outputs": StructuredOutputs(regex="[a-z]{30,}")}
    with weft.LLM(tmp_path, device="cuda", max_num_seqs=4, kv_cache_memory_bytes=32 << 20) as llm:
        _generate_twice_and_do_not_wait(llm, [{}, grammar, {"top_p": 0.9}, {"logprobs": 2}])


def _generate_twice_and_do_not_wait(llm: weft.LLM, asked: list[dict[str, Any]]) -> None:
    prompts = [tiny.prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    common = {"temperature": 0.7, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True}
    params = [SamplingParams(**common, **one) for one in asked]
    llm.generate(prompts, params, progress=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        llm.generate(prompts, params, progress=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_that_overlap_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins while the one before still runs, and waits within. If it read too soon, or wrote, the texts would
    part, as a few bits of any layer are enough for that in a hundred tokens."""
    pytest.importorskip("triton")
    from weft.kernels import fused

    if not fused.dependent(torch.device("cuda"))["PDL"]:
        pytest.skip("this device has no programmatic dependent launch")

    def texts() -> list[list[int]]:
        found = []
        limits = {"max_num_seqs": 40, "max_model_len": 2048, "kv_cache_memory_bytes": 8 << 30}
        with (
            shape_directory("qwen3-0.6b") as shape,
            weft.LLM(shape, load_format="dummy", device="cuda", **limits) as llm,
        ):
            for rows in (1, 3, 16, 40):  # by different kernels
                prompts = [tiny.prompt(100 + 37 * row % 900, row).tolist() for row in range(rows)]
                params = SamplingParams(temperature=0.8, seed=rows, max_tokens=100, ignore_eos=True)
                found += [result.token_ids for result in llm.generate(prompts, params, progress=False)]
        return found

    overlapping = texts()
    monkeypatch.setattr(fused, "PDL", False)
    assert texts() == overlapping


@pytest.mark.parametrize(
    ("where", "call"),
    [("begin_step", 2), ("begin_step", 20), ("fetch", 2), ("end_step", 2), ("end_step", 20), ("put_block_updates", 6)],
)
def test_a_step_that_was_given_up_does_no_harm(
    where: str, call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host and device each count the pages of the staging buffer. An error, or Ctrl-C, may come between the two: in
    steps with prompts, which come first, and in steps of decodes alone."""
    from weft.engine.staging import StagingBuffer

    tiny.save(tiny.llama(), tmp_path)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=TOKENS, ignore_eos=True)
    prompts = [tiny.prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]
    limits = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 32 << 20}
    original, calls = getattr(StagingBuffer, where), 0

    def fail(self: StagingBuffer, *arguments: Any) -> Any:
        nonlocal calls
        result = original(self, *arguments)
        calls += 1
        if calls == call:
            raise KeyboardInterrupt
        return result

    with weft.LLM(tmp_path, device="cuda", dtype="float32", **limits) as llm:
        expected = [result.token_ids for result in llm.generate(prompts, params, progress=False)]
        monkeypatch.setattr(StagingBuffer, where, fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, progress=False)
        found = [result.token_ids for result in llm.generate(prompts, params, progress=False)]
    assert found == expected


@pytest.mark.parametrize(("head_dim", "tokens"), [(16, 4000), (128, 4000), (128, 24)])
def test_nothing_is_compiled_in_service(head_dim: int, tokens: int, tmp_path: Path) -> None:
    """A kernel compiled for a number it has not met before would hold everybody up for half a second."""
    knobs = pytest.importorskip("triton").knobs
    tiny.save(tiny.llama(head_dim=head_dim), tmp_path)
    random = np.random.default_rng(0)
    compiled: list[str] = []
    limits = {"max_num_seqs": min(80, tokens), "max_num_batched_tokens": tokens, "kv_cache_memory_bytes": 1 << 28}
    with weft.LLM(tmp_path, device="cuda", dtype="bfloat16", **limits) as llm:
        knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
        try:
            for count in (1, 3, 50, 77):  # decodes beside prompts beyond any graph, and within
                prompts = [tiny.prompt(int(random.integers(3, 100)), seed).tolist() for seed in range(count)]
                params = SamplingParams(temperature=0.7, max_tokens=int(random.integers(5, 25)), ignore_eos=True)
                llm.generate(prompts, params, progress=False)
                for asked in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.9}, {"presence_penalty": 1.0}):
                    llm.generate(prompts[:3], replace(params, **asked), progress=False)  # type: ignore[arg-type]
                known = [tiny.prompt(40, 0).tolist() + tiny.prompt(50, seed).tolist() for seed in range(3)]
                llm.generate(known, params, progress=False)  # from the second on, behind what is cached
        finally:
            knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_no_memory_is_taken_in_service(tmp_path: Path) -> None:
    """The largest step's is there from the start: not only could it be missing later, the device waits for it."""
    tiny.save(tiny.llama(head_dim=128, intermediate_size=8192), tmp_path)
    limits = {"max_num_seqs": 80, "max_num_batched_tokens": 4000, "kv_cache_memory_bytes": 1 << 28}
    with weft.LLM(tmp_path, device="cuda", dtype="bfloat16", **limits) as llm:
        wishes: list[dict[str, Any]] = [
            {"prompt_logprobs": 1},
            {"top_p": 0.9},
            {"logprobs": 5},
            {"presence_penalty": 1.0},
        ]
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, presence_penalty=1.0), progress=False)  # histories
        before = torch.cuda.memory_reserved()
        for count, length in ((8, 500), (1, 511 - 8), (70, 57), (5, 3)):  # 4,000 tokens in a step, of few or many
            prompts = [tiny.prompt(length, seed).tolist() for seed in range(count)]
            params = [SamplingParams(max_tokens=8, **wishes[number % 4]) for number in range(count)]
            llm.generate(prompts, params, progress=False)
        assert torch.cuda.memory_reserved() - before <= 4 << 20  # torch's smallest pieces come by two mebibytes
