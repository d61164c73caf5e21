"""The embedded API as its users meet it, on a small model with random weights."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from tests.engine.tiny import CONFIG, talking_directory, tiny_directory
from weft import LLM, EngineError, OptionError, RequestError, SamplingParams
from weft.errors import PromptError

LONG_ENOUGH = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = talking_directory(tmp_path_factory.mktemp("talking"))
    return LLM(path, load_format="dummy", max_num_seqs=8, kv_cache_memory_bytes=1 << 20, seed=7)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.loop.discard_in_flight()
    scheduler = llm.engine.loop.scheduler
    scheduler.check_integrity()
    assert scheduler.kv.block_pool.num_free == scheduler.kv.block_pool.num_blocks
    assert not llm.engine.loop.sequences


def generate(llm: LLM, prompt: str | list[int], **params: Any) -> weft.Generation:
    (result,) = llm.generate(prompt, SamplingParams(**params), progress=False)
    return result


def test_a_directory_that_transformers_saved_works_with_token_ids(tmp_path: Path) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")})
    )
    model.save_pretrained(tmp_path)
    params = weft.SamplingParams(temperature=0, max_tokens=32)
    result = weft.LLM(tmp_path, dtype="float32").generate([[1, 2, 3]], params)[0]
    assert 1 <= len(result.token_ids) <= 32
    assert result.text == ""  # there is no tokenizer


def test_a_result_has_text_reason_and_times(llm: LLM) -> None:
    result = generate(llm, "Once upon a time", temperature=0, max_tokens=12, ignore_eos=True)
    assert llm.tokenizer is not None
    assert result.text == llm.tokenizer.decode(result.token_ids)
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 12
    assert result.metrics is not None
    assert min(result.metrics.queue, result.metrics.prefill, result.metrics.decode) >= 0
    assert result.metrics.ttft == pytest.approx(result.metrics.queue + result.metrics.prefill)


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    prompts = [f"{i} little words and {'more ' * i}" for i in range(20)]
    together = llm.generate(prompts, LONG_ENOUGH, progress=False)
    alone = [llm.generate(prompt, LONG_ENOUGH, progress=False)[0] for prompt in prompts]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.prompt for r in together] == prompts


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(r.token_ids) for r in llm.generate(["a", "b"], params, progress=False)] == [1, 5]
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], params)


def test_a_seed_decides_and_without_one_samples_differ(llm: LLM) -> None:
    seeded = [generate(llm, "word", max_tokens=12, seed=3).token_ids for _ in range(2)]
    free = [generate(llm, "word", max_tokens=12).token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert free[0] != free[1]


def test_n_completions_differ_and_the_first_is_that_of_n_1(llm: LLM) -> None:
    several = generate(llm, "word", n=3, max_tokens=12, seed=5)
    assert len({tuple(c.token_ids) for c in several.completions}) == 3
    assert several.token_ids == generate(llm, "word", max_tokens=12, seed=5).token_ids


def test_stop_strings_end_the_text_wherever_tokens_are_cut(llm: LLM) -> None:
    whole = generate(llm, "tell me", temperature=0, max_tokens=30, ignore_eos=True)
    printable = [i for i, c in enumerate(whole.text) if c != "\ufffd"]
    start = printable[len(printable) // 2]
    stop = whole.text[start : start + 2]
    cut = generate(llm, "tell me", temperature=0, max_tokens=30, ignore_eos=True, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.completions[0].stop) == ("stop", stop)
    assert len(cut.token_ids) < 30
    shown = generate(llm, "tell me", temperature=0, max_tokens=30, stop=[stop], include_stop_str_in_output=True)
    assert shown.text == whole.text[: whole.text.index(stop)] + stop


def test_stop_tokens_end_it_and_min_tokens_puts_that_off(llm: LLM) -> None:
    whole = generate(llm, "tell me", temperature=0, max_tokens=30, ignore_eos=True).token_ids
    stop = whole[4]
    cut = generate(llm, "tell me", temperature=0, max_tokens=30, stop_token_ids=[stop])
    assert cut.token_ids == whole[: whole.index(stop) + 1]
    assert cut.finish_reason == "stop"
    later = generate(llm, "tell me", temperature=0, max_tokens=30, stop_token_ids=[stop], min_tokens=10)
    assert len(later.token_ids) >= 10
    assert stop not in later.token_ids[:10]


def test_log_probabilities_of_prompt_and_output(llm: LLM) -> None:
    prompt = "a prompt that is long enough for several blocks of the cache"
    generate(llm, prompt, max_tokens=1)  # it is in the prefix cache now, which must not hide its log probabilities
    result = generate(llm, prompt, temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    assert result.logprobs is not None
    assert [one.token for one in result.logprobs] == result.token_ids
    assert all(one.rank == 1 and one.token in one.top and len(one.top) == 2 for one in result.logprobs)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [one.token for one in result.prompt_logprobs[1:] if one] == result.prompt_token_ids[1:]


def test_the_second_of_two_equal_prompts_computes_at_most_a_block(tmp_path: Path) -> None:
    roomy = LLM(tiny_directory(tmp_path, max_position_embeddings=2048), load_format="dummy")
    computed = []
    roomy.engine.loop.on_record = lambda record: computed.append(record.prefill_tokens)
    prompt = [1 + i * i % 60 for i in range(1000)]
    first, second = roomy.generate([prompt, prompt], SamplingParams(temperature=0, max_tokens=4), progress=False)
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 992)  # type: ignore[union-attr]
    assert sum(computed) == 1000 + 8  # both arrived in the same step
    (third,) = roomy.generate([prompt], SamplingParams(temperature=0, max_tokens=4), progress=False)
    assert sum(computed) == 1000 + 8 + 8
    assert first.token_ids == second.token_ids == third.token_ids


def test_a_stream_gives_the_same_text_in_pieces_and_the_prompt_s_progress(tmp_path: Path) -> None:
    slow = LLM(talking_directory(tmp_path), load_format="dummy", max_num_seqs=4, max_num_batched_tokens=16)
    prompt = "a long prompt that is read in slices of sixteen bytes, one a step"
    pieces = list(slow.stream(prompt, LONG_ENOUGH))
    assert "".join(piece.text for piece in pieces) == slow.generate(prompt, LONG_ENOUGH, progress=False)[0].text
    reading = [piece.prefilled for piece in pieces if not piece.token_ids]
    assert reading == sorted(reading)
    assert len(reading) >= 3
    assert (pieces[-1].finish_reason, pieces[0].finish_reason) == ("length", None)
    assert pieces[-1].metrics is not None


def test_streams_side_by_side_and_one_that_is_left(llm: LLM) -> None:
    expected = generate(llm, "one", temperature=0, max_tokens=20, ignore_eos=True).text
    one, other = llm.stream("one", LONG_ENOUGH), llm.stream("other", LONG_ENOUGH)
    text = next(one).text
    for _ in range(6):
        next(other)
    other.close()  # type: ignore[attr-defined]
    assert text + "".join(piece.text for piece in one) == expected


def test_a_stream_that_ends_under_another_one_s_turn_loses_nothing(llm: LLM) -> None:
    expected = generate(llm, "one", temperature=0, max_tokens=20, ignore_eos=True)
    stream = llm.stream("one", LONG_ENOUGH)
    pieces = [next(stream)]
    generate(llm, "something longer that runs on", temperature=0, max_tokens=60, ignore_eos=True)
    pieces += stream
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert "".join(piece.text for piece in pieces) == expected.text
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].metrics is not None


def test_an_interrupted_batch_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llm.stream("other", LONG_ENOUGH)
    pieces = [next(other)]
    with monkeypatch.context() as patch:
        interrupt_results(patch, after=3)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], LONG_ENOUGH, progress=False)
    # Whoever else is running does not lose a token by it.
    pieces += other
    expected = llm.generate("other", LONG_ENOUGH, progress=False)[0].token_ids
    assert [token for piece in pieces for token in piece.token_ids] == expected


def interrupt_results(patch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C while the loop waits for a step, which is where it spends its time."""
    wait = Future.result
    turns = iter(range(after))

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        if next(turns, None) is None:
            raise KeyboardInterrupt
        return wait(self, timeout)

    patch.setattr(Future, "result", interrupted)


def test_interrupts_do_not_use_up_the_seats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(talking_directory(tmp_path), load_format="dummy", max_num_seqs=1) as narrow:
        for after in range(6):
            with monkeypatch.context() as patch:
                interrupt_results(patch, after)
                with pytest.raises(KeyboardInterrupt):
                    narrow.generate("a", LONG_ENOUGH, progress=False)
        assert len(narrow.generate("a", LONG_ENOUGH, progress=False)[0].token_ids) == 20


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (result,) = llm.chat(messages, LONG_ENOUGH, progress=False)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(result.prompt_token_ids) == "user: hello\nassistant:"
    assert len(llm.chat([messages, messages], LONG_ENOUGH, progress=False)) == 2


def test_the_progress_bar_can_be_seen_and_switched_off(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a"], LONG_ENOUGH)
    shown = capsys.readouterr()
    assert "1/1" in shown.err
    assert shown.out == ""  # which is for results
    llm.generate(["a"], LONG_ENOUGH, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 257], "token id 257 at position 2 is outside the vocabulary 0..256"),
        ([1, -1], "token id -1 at position 1"),
        ([1] * 128, "the prompt has 128 tokens and must leave room for one more, but the context is 128"),
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([1.5, 2.5], "must be a flat list of whole numbers"),
        (5, "a prompt is text or a list of token ids, not 5"),
        ([[1], [2]], "must be a flat list of whole numbers"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=f"prompt 1: .*{message}"):
        llm.generate(["good", prompt], LONG_ENOUGH, progress=False)
    assert len(llm.generate("good", LONG_ENOUGH, progress=False)[0].token_ids) == 20


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"temperature": -1}, "temperature=-1 is out of range: it must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"temperature": "warm"}, "temperature='warm' is out of range"),
        ({"top_p": 0}, "top_p=0 is out of range: it must be above 0 and at most 1"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"frequency_penalty": 3}, "frequency_penalty=3"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens=5 is above max_tokens=4"),
        ({"n": 0}, "n=0"),
        ({"logprobs": 21}, "logprobs=21 is out of range: it must be at least 0 and at most 20"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty=1e-45"),
        (
            {"top_k": 10**19},
            "top_k=10000000000000000000 is out of range: it must be at least -1 and at most 2147483647",
        ),
        ({"min_tokens": 10**19, "max_tokens": None}, "min_tokens=10000000000000000000"),
        ({"ignore_eos": "false"}, "ignore_eos='false' must be True or False"),
        ({"stop": 5}, "stop=5 must be str or list or tuple"),
        ({"stop_token_ids": "ab"}, "stop_token_ids='ab' must be list or tuple"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\] must be Mapping"),
        ({"stop": [""]}, "a stop string must be non-empty text"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\]=101"),
        ({"logit_bias": {500: 1}}, "logit_bias names token id 500, outside 0..256"),
        ({"stop_token_ids": [257]}, "stop_token_ids names token id 257"),
        ({"seed": 2**64}, "seed=18446744073709551616"),
    ],
)
def test_nonsensical_parameters_are_refused_with_the_value_and_the_limit(
    llm: LLM, wish: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate("a", SamplingParams(**wish), progress=False)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_model_len": 256}, "max_model_len=256 is above the model's context of 128 tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number of at least 1"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens=32 is below max_num_seqs=64"),
        ({"max_model_len": 128, "kv_cache_memory_bytes": 30_000}, "less than one request of max_model_len=128"),
        ({"kv_cache_memory_bytes": 10}, "the KV cache has 10 bytes, but one block of 16 tokens takes 4096"),
        ({"max_nun_seqs": 4}, "unknown option 'max_nun_seqs'; known: model, dtype"),
        ({"gpu_memory_utilization": "much"}, "gpu_memory_utilization='?much"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"dtype": "int3"}, "dtype 'int3' is not supported"),
        ({"device": "tpu"}, "device='tpu' is not supported"),
        ({"load_format": "pickle"}, "load_format='pickle' is unknown"),
    ],
)
def test_nonsensical_options_are_refused(tmp_path: Path, option: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LLM(tiny_directory(tmp_path), **{"load_format": "dummy", **option})


def test_a_small_cache_shortens_the_context_where_none_was_asked_for(tmp_path: Path) -> None:
    small = LLM(tiny_directory(tmp_path), load_format="dummy", kv_cache_memory_bytes=20_000)
    assert small.engine.max_model_len < 128
    results = small.generate([[i + 1] * 20 for i in range(6)], LONG_ENOUGH, progress=False)
    assert all(len(r.token_ids) == 20 for r in results)


def test_a_step_that_fails_is_raised_and_the_next_request_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llm.stream("other", LONG_ENOUGH)
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.loop.executor.model, "logits", lambda hidden: 1 / 0)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            llm.generate(["a", "b"], LONG_ENOUGH, progress=False)
    with pytest.raises(EngineError, match="did not finish: a step failed or was interrupted"):
        list(other)
    assert len(llm.generate("a", LONG_ENOUGH, progress=False)[0].token_ids) == 20


def test_a_step_that_cannot_be_submitted_leaves_nothing_cached(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = "a prompt of several blocks, whose content was planned and never computed"
    expected = generate(llm, prompt, temperature=0, max_tokens=5).token_ids
    llm.engine.loop.scheduler.kv.clear_cache()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.loop.executor, "submit", lambda *step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(prompt, LONG_ENOUGH, progress=False)
    again = generate(llm, prompt, temperature=0, max_tokens=5)
    assert again.token_ids == expected
    assert again.metrics is not None
    assert again.metrics.cached_tokens == 0


def test_a_closed_llm_says_so(tmp_path: Path) -> None:
    short = LLM(talking_directory(tmp_path), load_format="dummy")
    stream = short.stream("a", LONG_ENOUGH)
    next(stream)
    short.close()
    with pytest.raises(EngineError, match="was closed"):
        list(stream)
    with pytest.raises(EngineError, match="is closed"):
        short.generate("a", progress=False)


def test_not_a_number_in_one_request_does_not_reach_another(tmp_path: Path) -> None:
    """Blocks are reused: what an earlier owner left in them is padding to the next one, and must have no effect."""
    with LLM(talking_directory(tmp_path), load_format="dummy", kv_cache_memory_bytes=100_000) as small:
        prompts = [list(range(1, n)) for n in (5, 40, 20)]
        expected = [r.token_ids for r in small.generate(prompts, LONG_ENOUGH, progress=False)]
        for pool in (*small.engine.loop.executor.kv.k, *small.engine.loop.executor.kv.v):  # type: ignore[attr-defined]
            pool.fill_(torch.nan)
        small.engine.loop.scheduler.kv.clear_cache()
        assert [r.token_ids for r in small.generate(prompts, LONG_ENOUGH, progress=False)] == expected


def test_only_the_first_of_n_describes_the_prompt(llm: LLM) -> None:
    tokens = []
    llm.engine.loop.on_record = lambda record: tokens.append(record.prefill_tokens)
    result = generate(llm, "x" * 100, n=4, max_tokens=2, prompt_logprobs=1)
    llm.engine.loop.on_record = lambda record: None
    assert result.prompt_logprobs is not None
    assert all(one is not None for one in result.prompt_logprobs[1:])
    assert sum(tokens) == 100 + 3 * 4  # the others take six of seven blocks from the cache


def test_a_tiny_temperature_is_greedy(llm: LLM) -> None:
    greedy = generate(llm, "word", temperature=0, max_tokens=8).token_ids
    assert generate(llm, "word", temperature=1e-40, max_tokens=8).token_ids == greedy


def test_the_tokenizer_s_end_of_text_counts_where_the_config_names_none(tmp_path: Path) -> None:
    with LLM(talking_directory(tmp_path, eos_token_id=None), load_format="dummy") as quiet:
        assert generate(quiet, "a", logit_bias={256: 100}, max_tokens=5).token_ids == [256]


def test_a_model_s_own_recommendation_is_the_default(tmp_path: Path) -> None:
    path = talking_directory(tmp_path)
    (path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "do_sample": true}')
    with LLM(path, load_format="dummy") as advised:
        assert advised.default_params == SamplingParams(temperature=0.25, top_k=7)
    (path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(weft.ModelError, match=r"generation_config\.json: top_p=7 is out of range"):
        LLM(path, load_format="dummy")


def test_a_cache_is_shared_only_within_a_salt(llm: LLM) -> None:
    def cached(salt: str) -> int:
        (result,) = llm.generate("y" * 60, LONG_ENOUGH, progress=False, cache_salt=salt)
        assert result.metrics is not None
        return result.metrics.cached_tokens

    assert [cached("a"), cached("b"), cached("a")] == [0, 0, 48]


@pytest.mark.parametrize("options", [{"max_num_seqs": 1, "max_model_len": 16}, {"max_num_seqs": 1, "block_size": 256}])
def test_small_engines_are_possible(tmp_path: Path, options: dict[str, int]) -> None:
    with LLM(tiny_directory(tmp_path), load_format="dummy", **options) as small:
        assert len(small.generate([[1, 2]], LONG_ENOUGH, progress=False)[0].token_ids) in (14, 20)


@pytest.mark.parametrize("prompts", [5, None])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts must be text, token ids or a list of them"):
        llm.generate(prompts)


def test_token_ids_may_be_an_array_and_parameters_must_be_parameters(llm: LLM) -> None:
    ids = np.array([1, 2, 3])
    assert llm.generate(ids, LONG_ENOUGH, progress=False)[0].prompt_token_ids == [1, 2, 3]  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling_params must be SamplingParams"):
        llm.generate([[1]], {"temperature": 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, [5], 5])
def test_malformed_messages_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages must be a list of objects"):
        llm.chat(messages)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    mute = LLM(tiny_directory(tmp_path), load_format="dummy")
    with pytest.raises(RequestError, match=r"has no tokenizer\.json, so text cannot be read: give token ids"):
        mute.generate("hello")
    with pytest.raises(RequestError, match="use stop_token_ids"):
        mute.generate([[1]], SamplingParams(stop="x"))


def test_bfloat16_runs_on_this_cpu(tmp_path: Path) -> None:
    with LLM(talking_directory(tmp_path), load_format="dummy", dtype="bfloat16") as half:
        assert half.engine.loop.executor.kv.k[0].dtype == torch.bfloat16  # type: ignore[attr-defined]
        assert len(half.generate("words " * 15, LONG_ENOUGH, progress=False)[0].token_ids) == 20
