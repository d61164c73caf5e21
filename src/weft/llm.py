"""The embedded API: a model in this process, with the same loop and the same text handling as the server."""

import math
import numbers
from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.engine.build import build_engine
from weft.engine.engine import RequestOptions
from weft.engine.executor import TokenLogprobs
from weft.engine.options import EngineOptions
from weft.engine.params import SamplingParams
from weft.engine.pooling import check_dimensions, finished, pooling_of, pooling_params
from weft.engine.sequence import Sequence
from weft.engine.sequence_table import TokenEvent
from weft.errors import EngineError, ModelError, PromptError, RequestError
from weft.files import read_json
from weft.hub import resolve_model
from weft.progress import batch_progress
from weft.text.chat import ChatTemplate
from weft.text.text_stream import TextStream
from weft.text.tokenizer import Tokenizer

DEFAULT_MODEL = Path(__file__).parent / "default_model"
Prompt = str | abc.Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Times of one completion, in seconds."""

    queue: float  # from arrival to the first step with this request
    prefill: float  # from there to its first token
    decode: float  # from there to its last
    ttft: float  # queue + prefill
    cached_tokens: int  # of the prompt, found in the prefix cache
    preemptions: int
    gap_target: float | None  # promised or wished time between tokens, the smaller one; None: neither
    ttft_target: float | None  # promised time to the first token; None: no promise
    predicted_ttft: float | None  # predicted at its arrival or its refusal; None: not predicted


@dataclass(slots=True)
class Completion:
    """One continuation of a prompt."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None  # "stop", "length" or "refused"
    stop: str | None = None  # the stop string that ended it
    logprobs: list[TokenLogprobs] | None = None
    metrics: Metrics | None = None


@dataclass(slots=True)
class Generation:
    """The result of one prompt: `n` completions. The shortcuts refer to the first one."""

    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token: nothing predicts it

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def metrics(self) -> Metrics | None:
        return self.completions[0].metrics


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one prompt."""

    prompt_token_ids: list[int]
    vector: NDArray[np.float32]
    metrics: Metrics | None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream. During prefill it has no text, only progress."""

    text: str
    token_ids: list[int]
    prefilled: int  # tokens of the prompt that are prefilled so far
    prompt_tokens: int
    finish_reason: str | None = None
    metrics: Metrics | None = None  # with the last piece


class LLM:
    """`LLM(model).generate(prompts)`. Without a model, loads the small one that ships with weft.

    Options are the fields of `EngineOptions`. Not for use from several threads at once. Any number of `stream`
    iterators may be open at the same time.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.options = EngineOptions.of(model=None if model is None else str(model), **options)
        self.path = resolve_model_path(self.options.model)
        self.tokenizer = Tokenizer.load(self.path)
        self.chat_template = ChatTemplate.load(self.path)
        self.default_params = recommended_params(self.path)
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        self.engine = build_engine(self.options, self.path, () if eos is None else (eos,))
        self._readers: dict[str, _Reader] = {}
        self._closed = False

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        priority: int = 0,
        tenant: str = "",
        batch: bool = False,
        gap_target_ms: float | None = None,
        ttft_target_ms: float | None = None,
        cache_salt: str = "",
    ) -> list[Generation]:
        """Completes every prompt (text or token ids), in the order given. Shows a progress bar if `progress` is set.

        Without `sampling_params`, the model's own recommendation is used (`default_params`). A lower `priority` goes
        first. Tenants share capacity by tokens. `batch` requests use only the capacity that all other requests leave.
        If the LLM was made with targets, a request may set different ones. A request with a target that could not be
        kept is refused (finish_reason "refused"; the numbers that explain it are in `metrics`). Prompts share cached
        prefixes only with prompts of the same `cache_salt`.
        """
        every = _as_batch(prompts)
        params = _as_params(self.default_params if sampling_params is None else sampling_params, len(every))
        options = RequestOptions(
            priority=priority,
            tenant=tenant,
            flex=batch,
            gap_target_ms=gap_target_ms,
            ttft_target_ms=ttft_target_ms,
        )
        groups = []
        for number, (prompt, own) in enumerate(zip(every, params, strict=True)):
            try:
                groups.append(self._open(prompt, own, options, cache_salt))
            except RequestError as error:
                raise PromptError(number, str(error)) from None
        self._run([reader for group in groups for reader in group], progress)
        return [
            _generation(prompt if isinstance(prompt, str) else None, group)
            for prompt, group in zip(every, groups, strict=True)
        ]

    def embed(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        progress: bool = True,
    ) -> list[Embedding]:
        """The embedding of every prompt (text or token ids), in the order given: the hidden state of the last token
        (`pooling="last"`), or the mean over all tokens ("mean"). Without `pooling`, as the model's files say; else the
        last.

        `dimensions` keeps only so many leading numbers. `normalize` scales vectors to length one.
        """
        params = pooling_params(pooling_of(self.path) if pooling is None else pooling)
        check_dimensions(dimensions, self.engine.hidden_size)
        every = _as_batch(prompts)
        readers: list[_Reader] = []
        for number, prompt in enumerate(every):
            try:
                readers += self._open(prompt, params, RequestOptions(flex=True), "")  # no promise, so no refusal
            except RequestError as error:
                raise PromptError(number, str(error)) from None
        self._run(readers, progress)
        found = []
        for reader in readers:
            assert reader.embedding is not None, "a request that pools ends with its embedding"
            vector = finished(reader.embedding, dimensions, normalize)
            found.append(Embedding(reader.sequence.prompt.tolist(), vector, reader.completion.metrics))
        return found

    def chat(
        self,
        messages: abc.Sequence[Message] | abc.Sequence[abc.Sequence[Message]],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_options: Any,
    ) -> list[Generation]:
        """Answers one conversation, or each of a list of conversations, in the model's chat format."""
        several = isinstance(messages, abc.Sequence) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        conversations: Any = messages if several else [messages]
        prompts = [self.chat_prompt(conversation, **template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def chat_prompt(self, messages: abc.Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's next turn."""
        good = isinstance(messages, abc.Sequence) and all(isinstance(message, Mapping) for message in messages)
        if not good:
            raise RequestError('messages must be a list of objects such as {"role": "user", "content": "Hello"}')
        text = self.chat_template.render([dict(message) for message in messages], **template_options)
        return self._tokenizer().encode(text, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        batch: bool = False,
        gap_target_ms: float | None = None,
        ttft_target_ms: float | None = None,
        cache_salt: str = "",
    ) -> Iterator[Delta]:
        """Completes one prompt, piece by piece. Reading the first piece starts it; closing the iterator ends it."""
        params = sampling_params or self.default_params
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one completion; open several, or use generate")
        options = RequestOptions(
            priority=priority,
            tenant=tenant,
            flex=batch,
            gap_target_ms=gap_target_ms,
            ttft_target_ms=ttft_target_ms,
        )
        (reader,) = self._open(prompt, params, options, cache_salt)
        return self._follow(reader)

    def close(self) -> None:
        """Ends all running requests and releases the model. A `with` block does this by itself."""
        self._closed = True
        self._forget(list(self._readers.values()))
        self.engine.loop.discard_in_flight()
        self.engine.loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _follow(self, reader: "_Reader") -> Iterator[Delta]:
        total, shown, tokens, seen = len(reader.sequence.prompt), 0, 0, -1
        completion = reader.completion
        try:
            self._start([reader])
            while True:
                # A step of another stream may have brought tokens for this one: emit them before running another step.
                text, ids = completion.text[shown:], completion.token_ids[tokens:]
                shown, tokens = shown + len(text), tokens + len(ids)
                prefilled = total if tokens else min(total, self.engine.loop.num_computed_tokens(reader.sequence))
                if ids or reader.done or prefilled != seen:
                    yield Delta(text, ids, prefilled, total, completion.finish_reason, completion.metrics)
                seen = prefilled
                if reader.done and tokens == len(completion.token_ids):
                    return
                self._pump([reader])
        finally:
            self._forget([reader])

    def _run(self, readers: list["_Reader"], progress: bool) -> None:
        try:
            self._start(readers)
            with batch_progress(len(readers), progress) as advance:
                waiting = readers
                while waiting:
                    tokens = self._pump(waiting)
                    still = [reader for reader in waiting if not reader.done]
                    advance(len(waiting) - len(still), tokens)
                    waiting = still
        finally:
            self._forget(readers)

    def _open(self, prompt: Prompt, params: SamplingParams, options: RequestOptions, salt: str) -> list["_Reader"]:
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need text, but the model directory has no tokenizer: use stop_token_ids")
        ids = self._tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        sequences = self.engine.create_sequences(ids, params, options=options, salt=salt)
        return [_Reader(sequence, self.tokenizer) for sequence in sequences]

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no tokenizer.json, so text cannot be read: give token ids")
        return self.tokenizer

    def _start(self, readers: list["_Reader"]) -> None:
        if self._closed:
            raise EngineError("this LLM is closed; make a new one")
        for reader in readers:
            reader.sequence.request.arrival = self.engine.loop.clock()
            self._readers[reader.sequence.request.id] = reader
            self.engine.loop.add(reader.sequence)

    def _forget(self, readers: list["_Reader"]) -> None:
        """Ends requests that are still open, also when the caller was interrupted."""
        for reader in readers:
            self.engine.loop.abort(reader.sequence)
            self._readers.pop(reader.sequence.request.id, None)

    def _pump(self, waiting: list["_Reader"]) -> int:
        """Runs one step and passes its events to the readers of all sequences. Returns the number of new tokens.

        Raises if a reader in `waiting` can get nothing any more: a step failed, or the LLM was closed.
        """
        for reader in waiting:
            if reader.sequence.request.finish_reason in ("error", "abort"):
                why = "this LLM was closed" if self._closed else "a step failed or was interrupted while it ran"
                raise EngineError(f"request {reader.sequence.request.id} did not finish: {why}")
        events = self.engine.loop.step()
        for event in events:
            reader = self._readers[event.sequence.request.id]
            reader.add_event(event)
            if reader.completion.stop is not None:
                self.engine.loop.abort(event.sequence, "stop")
            if reader.done:
                reader.completion.metrics = _metrics(event.sequence)
        return sum(event.token is not None for event in events)


class _Reader:
    """Turns the events of one sequence into its completion."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer | None) -> None:
        params = sequence.params
        self.sequence = sequence
        self.completion = Completion(logprobs=None if params.logprobs is None else [])
        self.embedding: NDArray[np.float32] | None = None
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position; after a preemption, one may come twice
        self._text = None
        if tokenizer is not None:
            self._text = TextStream(
                tokenizer,
                sequence.prompt.tolist(),
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )

    @property
    def done(self) -> bool:
        return self.completion.finish_reason is not None

    def add_event(self, event: TokenEvent) -> None:
        completion = self.completion
        for offset, found in enumerate(event.prompt_logprobs or ()):
            self.prompt_logprobs[event.prompt_first + 1 + offset] = found
        if event.embedding is not None:
            self.embedding = event.embedding
        if event.token is None or self.done:
            completion.finish_reason = completion.finish_reason or event.finish_reason
            return
        completion.token_ids.append(event.token)
        if completion.logprobs is not None and event.logprobs is not None:
            completion.logprobs.append(event.logprobs)
        completion.finish_reason = event.finish_reason
        if self._text is not None:
            completion.text += self._text.push(event.token, event.finish_reason)
            if self._text.stopped is not None:
                completion.finish_reason, completion.stop = "stop", self._text.stopped


def resolve_model_path(model: str | None) -> Path:
    """The directory of a model, with a config.json in it. Needs no torch, so that a wrong path is reported at once."""
    if model is None:
        return DEFAULT_MODEL
    path = resolve_model(model)
    read_json(path / "config.json")
    return path


def _as_batch(prompts: Any) -> list[Prompt]:
    """The prompts as a list. A flat list of numbers is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, abc.Sequence) and not hasattr(prompts, "__array__"):
        raise RequestError(f"prompts must be text, token ids or a list of them, not {prompts!r}")
    return [prompts] if len(prompts) and isinstance(prompts[0], numbers.Number) else list(prompts)


def recommended_params(path: Path) -> SamplingParams:
    """The sampling parameters that generation_config.json recommends. Others have the defaults of SamplingParams."""
    file = path / "generation_config.json"
    said = read_json(file, optional=True)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    if said.get("do_sample") is False:  # its other numbers do not apply then
        return SamplingParams()
    try:
        return SamplingParams(**{name: said[name] for name in names if said.get(name) is not None})
    except RequestError as error:
        raise ModelError(f"{file}: {error}") from None


def _as_params(params: SamplingParams | abc.Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, abc.Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, not {params!r}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one for each")
    return list(params)


def _generation(prompt: str | None, readers: list[_Reader]) -> Generation:
    first = readers[0]
    found = None
    if first.sequence.params.prompt_logprobs is not None:
        found = [first.prompt_logprobs.get(position) for position in range(len(first.sequence.prompt))]
    return Generation(prompt, first.sequence.prompt.tolist(), [reader.completion for reader in readers], found)


def _metrics(sequence: Sequence) -> Metrics:
    request = sequence.request
    started = request.started if request.started is not None else request.arrival
    first = request.first_token if request.first_token is not None else started
    finished = request.finished if request.finished is not None else first
    return Metrics(
        queue=started - request.arrival,
        prefill=first - started,
        decode=finished - first,
        ttft=first - request.arrival,
        cached_tokens=request.cached_tokens,
        preemptions=request.preemptions,
        gap_target=_finite(min(request.gap_target, request.gap_wish)),
        ttft_target=_finite(request.ttft_target),
        predicted_ttft=_finite(request.predicted_ttft),
    )


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) else None
