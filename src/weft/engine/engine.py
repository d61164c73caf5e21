"""Engine: checks requests and creates their Sequences, which its loop runs."""

import itertools
import random
from collections import abc
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.core import Targets
from weft.engine.calibration import Calibration
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.options import check_milliseconds
from weft.engine.params import SamplingParams
from weft.engine.sequence import SchedulingParams, Sequence
from weft.engine.structured import Grammars, RequestGrammar
from weft.errors import EMPTY_PROMPT, OptionError, RequestError


class RequestOptions(NamedTuple):
    """What a request asks of the scheduler. `Engine.scheduling_params` returns what it gets."""

    priority: int = 0  # lower goes first
    tenant: str = ""  # tenants share the engine fairly, counted in tokens
    precedence: int = 0  # lower goes first, among prompts of the same tenant
    flex: bool = False  # wants no target: uses capacity that other requests leave
    gap_target_ms: float | None = None  # None: the engine's target
    ttft_target_ms: float | None = None  # None: the engine's target
    user: str = ""  # end user within the tenant: further prompts of one user queue behind other users'; "": none


@dataclass(frozen=True)
class CalibratedTargets:
    """The latency targets of an engine, and the calibration of its step times, without which no target can be kept."""

    targets: Targets
    calibration: Calibration


class Engine:
    """The front of the engine: checks requests, and creates their Sequences. It runs nothing: `loop` does.

    It knows what requests are checked against: the model's limits, the grammars, and the latency targets.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        seed: int | None,
        calibrated_targets: CalibratedTargets | None = None,
        grammars: Grammars | None = None,
        hidden_size: int = 0,
        block_space: bytes = b"",
    ) -> None:
        self.loop = loop
        self.grammars = grammars  # None: no structured output
        self.calibrated_targets = calibrated_targets  # None: no targets
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size  # length of an embedding
        self.block_space = block_space  # see fingerprint.py
        self.eos_ids = eos_ids
        self.max_model_len = max_model_len
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def create_sequences(
        self,
        prompt: abc.Sequence[int],
        params: SamplingParams,
        *,
        options: RequestOptions | None = None,
        salt: str = "",
    ) -> list[Sequence]:
        """Checks a request and returns its `params.n` sequences. Nothing runs before `loop.add`.

        A new structure is tried out here, which takes milliseconds. `grammars.check` can do that in advance, on another
        thread.
        """
        tokens = self._checked(prompt)
        params.check_vocabulary(self.vocab_size)
        constrained = params.structured_outputs is not None
        scheduling = self.scheduling_params(options or RequestOptions(), len(tokens), constrained)
        grammars = self._grammars(params)
        room = self.max_model_len - len(tokens)
        number = next(self._numbers)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        root = root_hash(salt, self.block_space)
        hashes = prompt_hashes(root, tokens, self.loop.scheduler.block_size)
        # Only the first sequence reports prompt log probabilities, so the others can use the prefix cache.
        silent = replace(params, prompt_logprobs=None)
        return [
            Sequence.create(
                f"{number:08d}-{index}",
                tokens,
                silent if index else params,
                seed=seed + index * 0x9E3779B97F4A7C15,  # independent noise for each of the n sequences
                max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
                eos_ids=self.eos_ids,
                root=root,
                hashes=hashes,
                arrival=self.loop.clock(),
                scheduling=scheduling,
                grammar=grammar,
                sibling=index > 0,
            )
            for index, grammar in enumerate(grammars)
        ]

    def scheduling_params(
        self, options: RequestOptions, prompt_tokens: int, constrained: bool = False
    ) -> SchedulingParams:
        """Returns the class and the targets that a request gets. Raises a RequestError on invalid options."""
        for name, number in (("priority", options.priority), ("precedence", options.precedence)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise RequestError(f"{name}={number!r} must be a whole number; lower goes first")
        ttft_ms, gap_ms = options.ttft_target_ms, options.gap_target_ms
        for name, value in (("gap_target_ms", gap_ms), ("ttft_target_ms", ttft_ms)):
            if value is None:
                continue
            try:
                check_milliseconds(name, value)
            except OptionError as error:
                raise RequestError(str(error)) from None
            if options.flex or self.calibrated_targets is None:
                why = "a batch request" if options.flex else "an engine that was started without targets"
                raise RequestError(f"{name}={value:g}: {why} promises nothing; leave the target out")
        params = SchedulingParams(
            priority=options.priority,
            tenant=options.tenant,
            precedence=options.precedence,
            flex=options.flex,
            user=options.user,
        )
        if options.flex or self.calibrated_targets is None:
            return params
        promise = self.calibrated_targets.targets.promise(
            prompt_tokens,
            ttft=None if ttft_ms is None else ttft_ms / 1000,
            gap=None if gap_ms is None else gap_ms / 1000,
            constrained=constrained,
        )
        return params._replace(
            ttft_target=promise.ttft,
            ttft_source=promise.ttft_source,
            gap_target=promise.gap,
            gap_source=promise.gap_source,
            gap_wish=promise.gap_wish,
        )

    def _grammars(self, params: SamplingParams) -> abc.Sequence[RequestGrammar | None]:
        """One grammar (or None) for each of the n completions."""
        if params.structured_outputs is None:
            return [None] * params.n
        if self.grammars is None:
            raise RequestError("structured_outputs: this engine has no tokens to spell it with; leave it out")
        return self.grammars.compile(params.structured_outputs, params.n)

    def _checked(self, prompt: abc.Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
        if not isinstance(prompt, abc.Sequence | np.ndarray) or isinstance(prompt, str | bytes):
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
