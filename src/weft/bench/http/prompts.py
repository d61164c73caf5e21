"""Prompts of an exact number of tokens, for a tokenizer that is only known through a function that counts tokens.

Prompts are made of atoms: words that add exactly one token each, whichever atom precedes them.
"""

import asyncio
import string
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import overload

from weft.bench.http.load_request import LoadRequest
from weft.bench.http.workload import RequestSpec
from weft.errors import EngineError, OptionError
from weft.sim.traces import MOONCAKE_BLOCK
from weft.text.tokenizer import Tokenizer

# Counts the tokens of several texts as the server counts a prompt, including all tokens that it adds around the text.
# It may be slow (one request per text), so it is called rarely, and with many texts at a time.
Count = Callable[[list[str]], Awaitable[list[int]]]

LEAST_ATOMS = 16  # with fewer, prompts would hardly differ
MIXTURES = 8  # random texts that check whether words stay one token each in any order
MIXTURE_WORDS = 256
MOST_REQUESTS = 1_000_000  # nominal length of a run that is only limited by its duration; never reached
MOST_CHECKED = 16  # prompts per run with a checked token count
HEAD_WORDS = 4  # words before a given text: there are millions of ways to choose them
COMMON = """
the of and to in is it you that he was for on are with as his they be at one have this from had by hot but some what
there we can out other were all your when up use word how said an each she which do their time if will way about many
then them would write like so these her long make thing see him two has look more day could go come did my sound no
most number who over know water than call first people may down side been now find any new work part take get place
made live where after back little only round man year came show every good me give our under name very through just
form much great think say help low line before turn cause same mean right boy old too does tell set three want air
well also play small end put home read hand large land here must big high such act why ask men change went light kind
off need house try us again point mother world near build self earth father head stand own page should found answer
"""
# Tokenizers with a vocabulary of words include the space in the token; byte and character tokenizers count it as one.
SPELLINGS = (
    tuple(f" {word}" for word in COMMON.split()),
    tuple(f" {letter}" for letter in string.ascii_letters),
    tuple(string.ascii_letters + string.digits),
)


@dataclass(frozen=True)
class Atoms:
    """Words of one token each. A prompt of n of them has overhead + n tokens."""

    words: tuple[str, ...]
    overhead: int  # tokens that the server adds to every prompt: chat template, begin-of-text token, and the like

    @classmethod
    async def find(cls, count: Count) -> "Atoms":
        for candidates in SPELLINGS:
            for steady in await _in_a_row(candidates, count):
                atoms = await _in_any_order(steady, count)
                if len(atoms.words) >= LEAST_ATOMS:
                    return atoms
        raise OptionError(
            f"fewer than {LEAST_ATOMS} words and letters are one token each for this tokenizer, so no prompt can be "
            "made to a length in tokens; use another model, or name the model's own tokenizer with --tokenizer"
        )

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest prompt."""
        return self.overhead + 1

    def text(self, tokens: int, random: Random) -> str:
        """A random prompt of exactly `tokens` tokens, including the overhead."""
        self._check(tokens)
        return "".join(random.choices(self.words, k=tokens - self.overhead))

    def block(self, identity: int, tokens: int, seed: int = 0) -> str:
        """A block of `tokens` words, the same for one identity during a run. Shorter blocks are prefixes of longer."""
        return "".join(Random(f"block {seed} {identity}").choices(self.words, k=tokens))

    def head(self, purpose: str, seed: int) -> str:
        """A first line for all given texts of a run. Another line makes the same texts miss the server's prefix cache.

        Texts of one run that share a prefix still share it.
        """
        return "".join(Random(f"{purpose} {seed}").choices(self.words, k=HEAD_WORDS)) + "\n"

    def prompt(self, spec: RequestSpec, number: int, seed: int) -> str:
        """The prompt text of a spec.

        It is a given text after the run's head, or the shared blocks followed by words that begin differently for every
        `number`.
        """
        if spec.text:
            return self.head("sent", seed) + spec.text
        self._check(spec.prompt_tokens)
        parts, filled = [], self.overhead  # the overhead replaces part of the first block
        for number_of_blocks, identity in enumerate(spec.prefix_ids, start=1):
            end = min(number_of_blocks * MOONCAKE_BLOCK, spec.prompt_tokens)
            if end > filled:
                parts.append(self.block(identity, end - filled, seed))
                filled = end
        return "".join([*parts, self._own_words(spec.prompt_tokens - filled, number, seed)])

    def prompt_again(self, prompt: str, spec: RequestSpec, number: int, repetition: int, seed: int) -> str:
        """The prompt of spec `number` with the same length but other first words, so that a prefix cache misses it.

        Only the first words are new, because this runs during the measurement.
        """
        if spec.text:
            return self.head(f"sent {repetition}", seed) + spec.text
        tokens = min(HEAD_WORDS, spec.prompt_tokens - self.overhead)
        words = Random(f"again {seed} {number} {repetition}").choices(self.words, k=tokens)
        return "".join(words) + prompt.removeprefix(self._own_words(tokens, number, seed))

    def _own_words(self, tokens: int, number: int, seed: int) -> str:
        # The first two words encode the prompt's number, so that no two prompts share a prefix by accident.
        second, first = divmod(number + seed, len(self.words))
        head = [self.words[first], self.words[second % len(self.words)]]
        return "".join([*head, *Random(f"own {seed} {number}").choices(self.words, k=tokens)][:tokens])

    def _check(self, tokens: int) -> None:
        if tokens < self.least_tokens:
            raise OptionError(
                f"a prompt of {tokens} tokens cannot be made: the server puts {self.overhead} around it, "
                f"so ask for at least {self.least_tokens}"
            )


async def _in_a_row(candidates: Sequence[str], count: Count) -> list[Atoms]:
    """Candidates that add one token with every repetition, grouped by overhead, the lowest overhead first."""
    # An empty prompt may be refused, so the overhead is the count of a single word minus 1. It can depend on the word:
    # a template may strip the leading space, and only some words are one token without it.
    counts = await count([word * times for word in candidates for times in (1, 2, 3)])
    by_overhead: dict[int, list[str]] = {}
    for word, one, two, three in zip(candidates, counts[0::3], counts[1::3], counts[2::3], strict=True):
        if two - one == three - two == 1:
            by_overhead.setdefault(one - 1, []).append(word)
    return [Atoms(tuple(words), overhead) for overhead, words in sorted(by_overhead.items())]


async def _in_any_order(atoms: Atoms, count: Count) -> Atoms:
    """The atoms that stay one token each in random order; none if the words that merge cannot be found."""
    random = Random(0)
    while len(atoms.words) >= LEAST_ATOMS:
        length = atoms.overhead + MIXTURE_WORDS
        if set(await count([atoms.text(length, random) for _ in range(MIXTURES)])) == {length}:
            return atoms
        # Each word between all the others: the error of the count shows with how many of them it merges.
        length = atoms.overhead + 2 * len(atoms.words) + 1
        counts = await count(["".join(word + other for other in atoms.words) + word for word in atoms.words])
        off = [abs(found - length) for found in counts]
        # One word that merges with all the others gives each of them a small error, so only the worst are removed.
        kept = tuple(word for word, tokens in zip(atoms.words, off, strict=True) if 2 * tokens <= max(off))
        atoms = Atoms(kept if any(off) else (), atoms.overhead)
    return atoms


async def with_token_counts(specs: Sequence[RequestSpec], atoms: Atoms, seed: int, count: Count) -> list[RequestSpec]:
    """Specs of given texts with their lengths: of a prompt including the overhead, of an answer without it.

    The texts are counted after another head than the one they are sent with: a server that counts by answering keeps
    them in its prefix cache.
    """
    head = atoms.head("counted", seed)
    texts = [text for spec in specs for text in (spec.text, spec.answer)]
    # The count of a text of one token, minus 1, is the overhead of all texts: the head, and what the server adds.
    single, *tokens = await count([head + text for text in (atoms.words[0], *texts)])
    return [
        spec._replace(prompt_tokens=prompt, output_tokens=max(1, answer - (single - 1)))
        for spec, prompt, answer in zip(specs, tokens[0::2], tokens[1::2], strict=True)
    ]


async def make_requests(specs: Sequence[RequestSpec], atoms: Atoms, seed: int, check: Count) -> list[LoadRequest]:
    """The request of each spec, with its prompt.

    `check` verifies the token counts of a sample of the generated prompts, from the shortest to the longest.
    """
    made_up = [number for number, spec in enumerate(specs) if not spec.text]
    by_length = sorted(made_up, key=lambda number: specs[number].prompt_tokens)
    size = min(len(by_length), MOST_CHECKED)
    sample = [by_length[step * (len(by_length) - 1) // max(size - 1, 1)] for step in range(size)]
    if sample:
        texts = [_stand_in(specs[number], atoms, len(specs) + number, seed) for number in sample]
        for number, found in zip(sample, await check(texts), strict=True):
            if found != specs[number].prompt_tokens:
                raise EngineError(
                    f"a prompt that should have {specs[number].prompt_tokens} tokens has {found} by the server's "
                    "count; name the served model's own tokenizer with --tokenizer"
                )
    requests = []
    for number, spec in enumerate(specs):
        requests.append(LoadRequest(spec.at, atoms.prompt(spec, number, seed), spec.prompt_tokens, spec.output_tokens))
        await asyncio.sleep(0)  # long prompts take a while; lets Ctrl-C through
    return requests


class RepeatingRequests(Sequence[LoadRequest]):
    """Requests that repeat with other first words, for a run that is limited by its duration."""

    def __init__(self, requests: Sequence[LoadRequest], specs: Sequence[RequestSpec], atoms: Atoms, seed: int) -> None:
        assert not any(spec.prefix_ids for spec in specs), "what is shared would not be any more"
        self.requests, self.specs, self.atoms, self.seed = requests, specs, atoms, seed

    def __len__(self) -> int:
        return MOST_REQUESTS

    @overload
    def __getitem__(self, index: int) -> LoadRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[LoadRequest]: ...
    def __getitem__(self, index: int | slice) -> LoadRequest | list[LoadRequest]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        repetition, number = divmod(index, len(self.requests))
        request = self.requests[number]
        if not repetition:
            return request
        return replace(
            request, prompt=self.atoms.prompt_again(request.prompt, self.specs[number], number, repetition, self.seed)
        )


def _stand_in(spec: RequestSpec, atoms: Atoms, number: int, seed: int) -> str:
    """A prompt like the spec's, but of other words: a server that counts by answering would cache the real one."""
    return atoms.prompt(spec._replace(prefix_ids=tuple(~identity for identity in spec.prefix_ids)), number, seed)


def local_count(directory: Path) -> Count:
    """Returns a function that counts with the tokenizer in a model's directory."""
    tokenizer = Tokenizer.load(directory)
    if tokenizer is None:
        raise OptionError(f"{directory} has no tokenizer: name a directory with a tokenizer.json")
    known = tokenizer

    async def count(texts: list[str]) -> list[int]:
        return [len(ids) for ids in known.encode_batch(texts)]

    return count
