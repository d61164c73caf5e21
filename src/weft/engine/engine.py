"""Engine: a loop, the model's limits that requests are checked against, and the latency targets."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.core import Targets
from weft.engine.calibration import Calibration
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.options import check_milliseconds
from weft.engine.params import SamplingParams
from weft.engine.stream import Standing, Stream
from weft.engine.structured import Grammars, RequestGrammar
from weft.errors import EMPTY_PROMPT, OptionError, RequestError


class Wishes(NamedTuple):
    """Scheduling class and targets that a request asks for. The granted ones may differ: see `Engine.standing`."""

    priority: int = 0  # lower goes first
    tenant: str = ""  # tenants share the engine fairly, counted in tokens
    precedence: int = 0  # lower goes first, among prompts of the same tenant
    flex: bool = False  # wants no target: uses capacity that other requests leave
    gap_target_ms: float | None = None  # None: the engine's target
    ttft_target_ms: float | None = None  # None: the engine's target
    user: str = ""  # end user within the tenant: further prompts of one user queue behind other users'; "": none


@dataclass(frozen=True)
class Promises:
    """Targets of requests that name none, and the calibrated cost of steps."""

    targets: Targets
    calibration: Calibration


class Engine:
    """Checks requests and opens their streams. The loop runs them."""

    def __init__(
        self,
        loop: Loop,
        *,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        seed: int | None,
        promises: Promises | None = None,
        grammars: Grammars | None = None,
        hidden_size: int = 0,
        block_space: bytes = b"",
    ) -> None:
        self.loop = loop
        self.grammars = grammars  # None: no structured output
        self.promises = promises  # None: no targets
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size  # length of an embedding
        self.block_space = block_space  # see fingerprint.py
        self.eos_ids = eos_ids
        self.max_model_len = max_model_len
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def open_streams(
        self, prompt: Sequence[int], params: SamplingParams, *, wishes: Wishes | None = None, salt: str = ""
    ) -> list[Stream]:
        """Checks a request and returns its `params.n` streams. Nothing runs before `loop.add`.

        A new structure is tried out here, which takes milliseconds. `grammars.check` can do that in advance, on another
        thread.
        """
        tokens = self._checked(prompt)
        params.check_vocabulary(self.vocab_size)
        standing = self.standing(wishes or Wishes(), len(tokens), params.structured_outputs is not None)
        grammars = self._grammars(params)
        room = self.max_model_len - len(tokens)
        number = next(self._numbers)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        root = root_hash(salt, self.block_space)
        hashes = prompt_hashes(root, tokens, self.loop.scheduler.block_size)
        # Only the first stream reports prompt log probabilities, so the others can use the prefix cache.
        silent = replace(params, prompt_logprobs=None)
        return [
            Stream.open(
                f"{number:08d}-{index}",
                tokens,
                silent if index else params,
                seed=seed + index * 0x9E3779B97F4A7C15,  # independent noise for each of the n streams
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                eos_ids=self.eos_ids,
                root=root,
                hashes=hashes,
                arrival=self.loop.clock(),
                standing=standing,
                grammar=grammar,
                sibling=index > 0,
            )
            for index, grammar in enumerate(grammars)
        ]

    def standing(self, wishes: Wishes, prompt_tokens: int, constrained: bool = False) -> Standing:
        """Returns the class and the targets that a request gets. Raises a RequestError on invalid wishes."""
        priority, tenant, precedence, flex, gap_ms, ttft_ms, user = wishes
        for name, number in (("priority", priority), ("precedence", precedence)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise RequestError(f"{name}={number!r} must be a whole number; lower goes first")
        asked = {"gap_target_ms": gap_ms, "ttft_target_ms": ttft_ms}
        for name, value in asked.items():
            if value is None:
                continue
            try:
                check_milliseconds(name, value)
            except OptionError as error:
                raise RequestError(str(error)) from None
            if flex or self.promises is None:
                why = "a batch request" if flex else "an engine that was started without targets"
                raise RequestError(f"{name}={value:g}: {why} promises nothing; leave the target out")
        if flex or self.promises is None:
            return Standing(priority, tenant, precedence, flex, user=user)
        own_ttft = None if ttft_ms is None else ttft_ms / 1000
        own_gap = None if gap_ms is None else gap_ms / 1000
        promise = self.promises.targets.promise(prompt_tokens, own_ttft, own_gap, constrained)
        ttft, ttft_source, gap, gap_source, wish = promise
        return Standing(priority, tenant, precedence, flex, ttft, gap, ttft_source, gap_source, wish, user)

    def _grammars(self, params: SamplingParams) -> Sequence[RequestGrammar | None]:
        """One grammar (or None) for each of the n completions."""
        if params.structured_outputs is None:
            return [None] * params.n
        if self.grammars is None:
            raise RequestError("structured_outputs: this engine has no tokens to spell it with; leave it out")
        return self.grammars.compile(params.structured_outputs, params.n)

    def _checked(self, prompt: Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, str | bytes):
            raise RequestError(f"a prompt is text or a list of token ids, not {prompt!r}")
        if len(prompt) == 0:
            raise RequestError(EMPTY_PROMPT)
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and must leave room for one more, but the context is "
                f"{self.max_model_len}: shorten the prompt, or raise max_model_len if the model allows it"
            )
        try:
            tokens = np.asarray(prompt)
            whole = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise RequestError("a prompt of token ids must be a flat list of whole numbers")
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(wrong):
            at = int(wrong[0])
            raise RequestError(
                f"token id {tokens[at]} at position {at} is outside the vocabulary 0..{self.vocab_size - 1}"
            )
        return tokens.astype(np.int32)
