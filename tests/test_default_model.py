"""The model that ships with weft: it is what its card says, and it works with no argument at all."""

import random
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import weft
from weft import LLM, SamplingParams
from weft.llm import DEFAULT_MODEL
from weft.models import load_config

STORY = (
    "The old man opened the door and looked out into the garden. It was raining, and the wind was in the trees. "
    "He could see nobody, but he heard the sound of a horse upon the road, and he went back to the fire."
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as model:
        yield model


def mean_logprob(llm: LLM, prefix: str, text: str) -> float:
    """Of the tokens of `text` behind `prefix`."""
    assert llm.tokenizer is not None
    before, ids = llm.tokenizer.encode(prefix), llm.tokenizer.encode(text)
    (result,) = llm.generate([before + ids], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    assert result.prompt_logprobs is not None
    found = [one.logprob for one in result.prompt_logprobs[len(before) :] if one is not None]
    return sum(found) / len(found)


def test_it_is_small_and_has_a_long_context() -> None:
    assert sum(file.stat().st_size for file in DEFAULT_MODEL.iterdir()) <= 24_000_000
    config = load_config(DEFAULT_MODEL)
    assert config.architecture == "LlamaForCausalLM"
    assert config.max_context >= 8192
    card = (DEFAULT_MODEL / "README.md").read_text()
    assert "CC-BY-4.0" in card
    assert "public domain" in card


def test_it_knows_english_from_a_shuffle_of_words(llm: LLM) -> None:
    words = STORY.split()
    random.Random(0).shuffle(words)
    assert mean_logprob(llm, "", STORY) > mean_logprob(llm, "", " ".join(words)) + 1


def test_it_remembers_a_name_over_three_thousand_tokens(llm: LLM) -> None:
    def expects(name: str) -> float:
        beginning = f"Her name was {name}, and {name.split()[1]} was a name they feared."
        return mean_logprob(llm, f"{beginning}{f' {STORY}' * 60} Then came Wilhelmina", " Vandersloot")

    assert expects("Wilhelmina Vandersloot") > expects("Mary Smith") + 3


def test_it_takes_an_order_and_ends_its_turn(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi, can I get a latte with oat milk please?"}]
    (asked,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=80), progress=False)
    messages += [{"role": "assistant", "content": asked.text}, {"role": "user", "content": "Yes, that is correct."}]
    (confirmed,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=80), progress=False)
    assert (asked.finish_reason, confirmed.finish_reason) == ("stop", "stop")
    assert any(word in asked.text.lower() for word in ("correct", "right", "order", "confirm"))
    assert any(word in confirmed.text.lower() for word in ("ready", "order", "bar", "minutes", "soon"))


def test_it_says_what_it_is(llm: LLM) -> None:
    (result,) = llm.chat(
        [{"role": "user", "content": "What are you?"}], SamplingParams(temperature=0, max_tokens=80), progress=False
    )
    assert "model" in result.text.lower()


def test_transformers_reads_the_same_directory_and_agrees() -> None:
    theirs = LlamaForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    with weft.LLM(dtype="float32") as mine:
        assert mine.tokenizer is not None
        ids = mine.tokenizer.encode(STORY)
        assert ids == tokenizer(STORY)["input_ids"]
        (result,) = mine.generate([ids], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), progress=False)
        messages = [{"role": "user", "content": "A mocha, please."}]
        assert (
            mine.chat_prompt(messages)
            == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )
    batch = torch.tensor([ids])
    out = theirs.generate(
        batch, attention_mask=torch.ones_like(batch), max_new_tokens=32, do_sample=False, eos_token_id=None
    )
    assert result.token_ids == out[0, len(ids) :].tolist()
