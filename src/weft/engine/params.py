"""SamplingParams: the options of one request. Names and defaults are vLLM's where the meaning is the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from weft.errors import RequestError

MAX_LOGPROBS = 20  # alternatives reported per position
MAX_ALLOWED = 1024  # of allowed_token_ids: they are sent to the device with every step
MAX_COUNT = 2**31 - 1  # limit of token counts and similar: above any context, and fits the arrays


class Thoughts(NamedTuple):
    """Tags around the reasoning of a model before its reply."""

    start: str
    end: str
    starts_in_prompt: bool  # whether the prompt contains the start tag; if not, reasoning is optional


class Calls(NamedTuple):
    """How a model writes tool calls: JSON between marks."""

    schema: dict[str, Any]  # of the JSON between the marks
    start: str = ""
    end: str = ""
    many: bool = False  # whether several calls may follow each other


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The structure of an output, up to its end of text. Exactly one of json to grammar is given.

    The schema, regex or grammar is not checked here: see `weft.engine.structured`.
    """

    json: str | dict[str, Any] | None = (
        None  # a JSON schema, its objects closed; a keyword that cannot be enforced is an error
    )
    json_object: bool = False  # any JSON object
    regex: str | None = None  # matches the whole output; Rust syntax: no look-around, no back-references
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark in llguidance's dialect, or GBNF (with rules such as `root ::= ...`)
    behind: Thoughts | None = None  # the structure starts after this reasoning, which may be any text
    calls: Calls | None = None  # the output may be tool calls instead

    def __post_init__(self) -> None:
        names = _forms()
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise RequestError(f"structured_outputs has {found} in it: give exactly one of {', '.join(names)}")
        for name, kinds in (
            ("json", (str, dict)),
            ("json_object", (bool,)),
            ("regex", (str,)),
            ("choice", (list, tuple)),
            ("grammar", (str,)),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise RequestError(f"structured_outputs.{name} must be {wanted}, not {value!r:.80}")
        if self.choice is not None and not (self.choice and all(isinstance(text, str) for text in self.choice)):
            raise RequestError(f"structured_outputs.choice must name at least one text, not {self.choice!r:.80}")

    @classmethod
    def of(cls, data: Any) -> "StructuredOutputs":
        """Builds it from a JSON object. Raises a RequestError on an unknown field."""
        known = _forms()
        if not isinstance(data, Mapping):
            raise RequestError(f"structured_outputs must be an object with one of {', '.join(known)}, not {data!r:.80}")
        unknown = [name for name in data if name not in known]
        if unknown:
            raise RequestError(f"structured_outputs has an unknown field {unknown[0]!r:.80}; known: {', '.join(known)}")
        return cls(**data)

    @property
    def kind(self) -> str:
        """The name of the given field."""
        return next(name for name in _forms() if getattr(self, name) not in (None, False))


def _forms() -> list[str]:
    return [field.name for field in fields(StructuredOutputs) if field.name not in ("behind", "calls")]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0  # 0 (or below 1e-5): greedy
    top_k: int = 0  # keep the k most likely tokens; 0 or -1: all
    top_p: float = 1.0  # keep the smallest set of tokens that holds this much probability
    min_p: float = 0.0  # keep tokens at least this likely, relative to the most likely one
    repetition_penalty: float = 1.0  # > 1 discourages tokens of the prompt and the output
    frequency_penalty: float = 0.0  # per occurrence in the output
    presence_penalty: float = 0.0  # once, if in the output
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None  # only these are sampled: an end-of-text token too must be listed
    seed: int | None = None  # same seed, prompt and parameters give the same tokens, whatever else runs
    max_tokens: int | None = 16  # None: as many as the context allows
    min_tokens: int = 0  # no end of text and no stop before this many tokens
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives to report with each sampled token
    prompt_logprobs: int | None = None  # the same for each token of the prompt
    n: int = 1  # independent completions of one prompt
    # The output ends where the grammar ends, even with ignore_eos or before min_tokens, and nowhere else. The mask is
    # applied after bias and penalties. Log probabilities are from unedited logits, as always.
    structured_outputs: StructuredOutputs | None = None
    pooling: str | None = None  # "last" or "mean": return the prompt's embedding and no text; see engine/pooling.py

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, 100)
        _whole("top_k", self.top_k, -1, MAX_COUNT)
        _within("top_p", self.top_p, 0, 1, open_low=True)
        _within("min_p", self.min_p, 0, 1)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _whole("min_tokens", self.min_tokens, 0, MAX_COUNT)
        _whole("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.pooling is not None and (self.pooling not in ("last", "mean") or self.max_tokens != 1 or self.n != 1):
            raise RequestError(f"pooling={self.pooling!r}: choose last or mean, with max_tokens=1 and n=1")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        for name, kinds in (
            ("stop", (str, list, tuple)),
            ("stop_token_ids", (list, tuple)),
            ("allowed_token_ids", (list, tuple)),
            ("logit_bias", (Mapping,)),
            ("structured_outputs", (StructuredOutputs,)),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise RequestError(f"{name}={value!r} must be {' or '.join(kind.__name__ for kind in kinds)}")
        if self.allowed_token_ids is not None and not 1 <= len(self.allowed_token_ids) <= MAX_ALLOWED:
            raise RequestError(
                f"allowed_token_ids has {len(self.allowed_token_ids)} tokens: it must have 1 to {MAX_ALLOWED}"
            )
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise RequestError(
                "allowed_token_ids cannot stand beside a structure, which allows tokens as well: give one"
            )
        if any(not isinstance(stop, str) or not stop for stop in self.stop_strings):
            raise RequestError(f"stop={self.stop!r}: a stop string must be non-empty text")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} must be True or False")
        for token, bias in (self.logit_bias or {}).items():
            _within(f"logit_bias[{token}]", bias, -100, 100)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises a RequestError on token ids outside the model's vocabulary."""
        for name, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("stop_token_ids", self.stop_token_ids or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise RequestError(f"{name} names token id {token!r}, outside 0..{vocab_size - 1}")


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not good or (open_low and value == low):
        low_end = f"{'above' if open_low else 'at least'} {low}"
        raise RequestError(f"{name}={value!r} is out of range: it must be {low_end} and at most {high}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name}={value!r} must be a whole number")
    _within(name, value, low, high)
