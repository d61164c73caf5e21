"""Prompts of exact lengths, by tokenizers that the maker of prompts sees through a function only."""

import asyncio
from collections.abc import Callable
from itertools import pairwise, takewhile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from tests.strength import examples
from weft.bench.http.prompts import LEAST_ATOMS, Atoms, Count, make_requests, with_token_counts
from weft.bench.http.workload import RequestSpec
from weft.errors import EngineError, OptionError
from weft.sim.traces import MOONCAKE_BLOCK
from weft.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(weft.__file__).parent / "default_model")
assert TOKENIZER is not None

Measure = Callable[[str], int]  # tokens of one text


def count_plain(text: str) -> int:
    return len(TOKENIZER.encode(text))


def count_chat(text: str) -> int:
    """As a chat template counts that cuts spaces off at both ends."""
    return len(TOKENIZER.encode(f"<|user|>{text.strip()}<|end|><|assistant|>"))


def count_bytes(text: str) -> int:
    """A byte-level tokenizer with a token at the beginning and at the end."""
    return len(text.encode()) + 2


MEASURES: dict[str, Measure] = {"plain": count_plain, "chat": count_chat, "bytes": count_bytes}


class Counter:
    """A server's way to count: keeps the texts of every call, and refuses an empty one."""

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.calls: list[list[str]] = []

    async def __call__(self, texts: list[str]) -> list[int]:
        assert all(texts), "some servers refuse an empty prompt"
        self.calls.append(texts)
        return [self.measure(text) for text in texts]


def find(count: Count) -> Atoms:
    return asyncio.run(Atoms.find(count))


def beginning(one: str, other: str) -> str:
    """What both texts begin with."""
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


ATOMS = {name: find(Counter(measure)) for name, measure in MEASURES.items()}
kinds = st.sampled_from(sorted(MEASURES))


@pytest.mark.parametrize(("kind", "overhead"), [("plain", 0), ("chat", 3), ("bytes", 2)])
def test_atoms_are_found_together_with_the_overhead(kind: str, overhead: int) -> None:
    atoms = ATOMS[kind]
    assert atoms.overhead == overhead
    assert len(set(atoms.words)) == len(atoms.words) >= LEAST_ATOMS


def test_words_are_found_with_two_calls() -> None:
    count = Counter(count_plain)
    assert len(find(count).words) > 150
    assert len(count.calls) == 2


def test_a_prefix_that_the_tokenizer_adds_is_overhead() -> None:
    """As in Llama 2, whose tokenizer puts a space before the first word: the word's own space is then a token."""
    assert find(Counter(lambda text: 1 + text.startswith(" ") + len(text.split()))).overhead == 2


def test_a_word_that_merges_with_the_others_is_dropped_alone() -> None:
    def measure(text: str) -> int:
        words = text.split()
        return len(words) - sum(left == "of" != right for left, right in pairwise(words))

    atoms = find(Counter(measure))
    assert set(find(Counter(lambda text: len(text.split()))).words) - set(atoms.words) == {" of"}


def test_a_tokenizer_of_letters_with_spaces_gets_letters() -> None:
    atoms = find(Counter(lambda text: sum(2 * len(word) - 1 for word in text.split())))
    assert " a" in atoms.words
    assert {len(word) for word in atoms.words} == {2}


@pytest.mark.parametrize("measure", [lambda text: 1, lambda text: 2 * len(text), lambda text: len(set(text))])
def test_a_tokenizer_without_atoms_is_refused(measure: Measure) -> None:
    with pytest.raises(OptionError, match=r"fewer than 16 words.*--tokenizer"):
        find(Counter(measure))


@given(kinds, st.integers(1, 3000), st.integers())
@settings(deadline=None, max_examples=examples(60))
def test_a_text_has_exactly_the_tokens_asked_for(kind: str, more: int, seed: int) -> None:
    atoms = ATOMS[kind]
    tokens = atoms.overhead + more
    assert MEASURES[kind](atoms.text(tokens, Random(seed))) == tokens


@pytest.mark.parametrize("kind", MEASURES)
def test_a_prompt_too_short_for_the_overhead_is_refused(kind: str) -> None:
    atoms = ATOMS[kind]
    assert MEASURES[kind](atoms.text(atoms.least_tokens, Random(0))) == atoms.least_tokens
    for request in (
        lambda: atoms.text(atoms.overhead, Random(0)),
        lambda: atoms.prompt(RequestSpec(0, atoms.overhead, 1), 0, 0),
    ):
        with pytest.raises(OptionError, match=f"{atoms.overhead} tokens.*at least {atoms.least_tokens}"):
            request()


@given(kinds, st.integers(), st.integers(1, MOONCAKE_BLOCK))
@settings(deadline=None, max_examples=examples(60))
def test_a_block_is_the_same_for_its_identity_and_a_shorter_one_is_its_beginning(
    kind: str, identity: int, tokens: int
) -> None:
    atoms = ATOMS[kind]
    whole = atoms.block(identity, MOONCAKE_BLOCK)
    assert whole == atoms.block(identity, MOONCAKE_BLOCK)
    assert whole != atoms.block(identity + 1, MOONCAKE_BLOCK)
    part = atoms.block(identity, tokens)
    assert whole.startswith(part)
    assert MEASURES[kind](part) == atoms.overhead + tokens


@given(
    kinds,
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(st.integers(6, 9), max_size=2),
    st.lists(st.integers(10, 13), max_size=2),
    st.integers(4, 5 * MOONCAKE_BLOCK),
    st.integers(4, 5 * MOONCAKE_BLOCK),
)
@settings(deadline=None, max_examples=examples(100))
def test_shared_prefixes_are_common_text_and_counts_are_exact(
    kind: str, shared: list[int], one_ids: list[int], other_ids: list[int], one_tokens: int, other_tokens: int
) -> None:
    atoms, measure = ATOMS[kind], MEASURES[kind]
    specs = [RequestSpec(0, one_tokens, 1, (*shared, *one_ids)), RequestSpec(0, other_tokens, 1, (*shared, *other_ids))]
    one, other = (atoms.prompt(spec, number, 3) for number, spec in enumerate(specs))
    assert (measure(one), measure(other)) == (one_tokens, other_tokens)
    common = beginning(one, other)
    expected = min(one_tokens, other_tokens, MOONCAKE_BLOCK * len(shared))
    if expected > atoms.overhead:
        assert measure(common) >= expected
    within = min(one_tokens, other_tokens) - MOONCAKE_BLOCK * len(shared)
    if within >= 16:  # beyond the shared blocks both have words of their own: a few may agree by chance
        assert len(common) < min(len(one), len(other))


def test_an_overhead_of_more_than_a_block_leaves_the_later_blocks() -> None:
    atoms = Atoms(tuple(f" {number}" for number in range(20)), overhead=MOONCAKE_BLOCK + 100)
    prompt = atoms.prompt(RequestSpec(0, 2 * MOONCAKE_BLOCK + 7, 1, (1, 2)), 0, 0)
    assert len(prompt.split()) == MOONCAKE_BLOCK + 7 - 100
    assert prompt.startswith(atoms.block(2, MOONCAKE_BLOCK - 100))


def test_a_given_text_is_sent_behind_a_head_that_is_the_runs_own() -> None:
    spec = RequestSpec(0, 3, 1, text="how are you")
    one, same, other = (ATOMS["plain"].prompt(spec, number, seed) for number, seed in ((0, 0), (1, 0), (0, 1)))
    assert one == same, "what several texts begin with stays common"
    assert one != other
    assert one.endswith("\nhow are you")


PAIRS = [
    ("How are you?", "I am very well, thank you."),
    ("  1 + 1\n", "2"),
    ("Write a poem", "The sea\n\nis blue. " * 9),
]


@pytest.mark.parametrize("kind", MEASURES)
def test_an_answer_is_as_long_as_its_text_alone_and_a_prompt_as_it_is_sent(kind: str) -> None:
    atoms, measure = ATOMS[kind], MEASURES[kind]
    given = [RequestSpec(0, 0, 0, text=text, answer=answer) for text, answer in PAIRS]
    specs = asyncio.run(with_token_counts(given, atoms, 3, Counter(measure)))
    alone = len if kind == "bytes" else count_plain
    assert [spec.output_tokens for spec in specs] == [
        alone(answer.strip() if kind == "chat" else answer) for _, answer in PAIRS
    ]
    requests = asyncio.run(make_requests(specs, atoms, 3, Counter(measure)))
    assert [request.prompt_tokens for request in requests] == [measure(request.prompt) for request in requests]


def test_given_texts_that_were_counted_are_sent_with_another_beginning() -> None:
    count = Counter(count_plain)
    given = [RequestSpec(0, 0, 0, text=text, answer=answer) for text, answer in PAIRS]
    specs = asyncio.run(with_token_counts(given, ATOMS["plain"], 3, count))
    requests = asyncio.run(make_requests(specs, ATOMS["plain"], 3, count))
    seen = [text for texts in count.calls for text in texts]
    shared = [beginning(request.prompt, text) for request in requests for text in seen]
    assert max(map(len, shared)) < 10, "a word by chance at most: the head decides"


@pytest.mark.parametrize("kind", MEASURES)
def test_prompts_begin_with_different_words_as_long_as_there_are_any(kind: str) -> None:
    atoms = ATOMS[kind]
    shortest = [atoms.prompt(RequestSpec(0, atoms.least_tokens, 1), number, 5) for number in range(len(atoms.words))]
    assert sorted(shortest) == sorted(atoms.words)
    pairs = {atoms.prompt(RequestSpec(0, atoms.least_tokens + 1, 1), number, 5) for number in range(3000)}
    assert len(pairs) == min(3000, len(atoms.words) ** 2)


def test_a_prompt_is_the_same_for_the_same_number_and_seed() -> None:
    atoms, spec = ATOMS["plain"], RequestSpec(0, 50, 1)
    assert atoms.prompt(spec, 1, 2) == atoms.prompt(spec, 1, 2)
    assert len({atoms.prompt(spec, number, seed) for number in range(9) for seed in range(9)}) == 81


def test_asks_follow_the_wishes() -> None:
    atoms, count = ATOMS["chat"], Counter(count_chat)
    specs = [RequestSpec(number / 4, 20 + 7 * number, 5, (number % 3,)) for number in range(100)]
    requests = asyncio.run(make_requests(specs, atoms, 1, count))
    assert [(request.at, request.prompt_tokens, request.output_tokens) for request in requests] == [
        (spec.at, spec.prompt_tokens, spec.output_tokens) for spec in specs
    ]
    assert [count_chat(request.prompt) for request in requests] == [spec.prompt_tokens for spec in specs]


def test_lengths_are_checked_with_one_call_from_the_shortest_to_the_longest() -> None:
    count = Counter(count_plain)
    asyncio.run(make_requests([RequestSpec(0, tokens, 1) for tokens in range(100, 0, -1)], ATOMS["plain"], 1, count))
    (texts,) = count.calls
    lengths = [count_plain(text) for text in texts]
    assert len(set(lengths)) == 16
    assert (lengths[0], lengths[-1]) == (1, 100)


def test_the_check_leaves_the_prompts_of_the_run_out_of_the_servers_cache() -> None:
    count = Counter(count_plain)
    specs = [RequestSpec(0, 1200, 1, (1, 2)), RequestSpec(0, 1200, 1, (1,)), RequestSpec(0, 300, 1)]
    requests = asyncio.run(make_requests(specs, ATOMS["plain"], 1, count))
    (texts,) = count.calls
    shared = [beginning(request.prompt, text) for request in requests for text in texts]
    assert max(map(len, shared)) < 40, "a few letters of the first words at most"


def test_few_wishes_and_none_are_checked_too() -> None:
    for number in range(3):
        count = Counter(count_plain)
        assert len(asyncio.run(make_requests([RequestSpec(0, 9, 1)] * number, ATOMS["plain"], 1, count))) == number
        assert [len(texts) for texts in count.calls] == ([number] if number else [])


def test_a_server_that_counts_otherwise_is_named_with_both_counts() -> None:
    with pytest.raises(EngineError, match=r"should have 9 tokens has 10 by.*--tokenizer"):
        asyncio.run(
            make_requests([RequestSpec(0, 9, 1)], ATOMS["plain"], 1, Counter(lambda text: count_plain(text) + 1))
        )
