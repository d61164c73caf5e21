"""Structured output: converts a requested structure to a grammar, checks it and compiles it for a model's tokens.

llguidance does the work and is imported on first use. Torch is not needed.

Schemas and grammars are untrusted input. Their length is limited before llguidance sees them, and llguidance's limits
keep every step short. Most of these limits take effect only when a matcher advances, so a grammar is tried for some
tokens before it is accepted. A grammar that fails later allows only the end of text from then on, so that its request
ends with the output so far.
"""

import functools
import json
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.engine.params import Calls, StructuredOutputs, Thoughts
from weft.engine.schemas import closed
from weft.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_TEXT = 100_000  # characters of a schema, a regex or all choices
WHITE_SPACE_FACTOR = 10  # a schema given as text may be this many times longer, because of indentation
MAX_GRAMMAR = 20_000  # characters of a grammar; its first step may take time quadratic in its length
MAX_GBNF_RULES = 500  # the conversion to Lark may also take quadratic time
MAX_MULTIPLE = 10_000  # of multipleOf without decimal point and trailing zeros: that many states are built
MAX_PATTERNS = 100  # of patternProperties in one object: each must be distinguished from all others
DRY_RUN_TOKENS = 128  # generated before a grammar is accepted
CACHED_GRAMMARS = 64  # valid ones to remember
STACK_BYTES = 256 << 20  # the longest chain of references that fits MAX_TEXT takes about a quarter of it
# Allowed between the parts of JSON, as people write it. With unlimited white space, a small model would never stop.
WHITE_SPACE = r" |\r?\n[ \t]{0,32}"

TAGS = ("<think>", "</think>")

_T = TypeVar("_T")
Mask = NDArray[np.int32]  # a word has the bits of 32 tokens, lowest bit first


def check_structure(structure: StructuredOutputs) -> None:
    """Raises a RequestError if a structure is invalid for every model. Takes seconds in the worst case."""
    from llguidance import LLMatcher, LLTokenizer

    if structure.calls is not None:
        check_structure(StructuredOutputs(json=structure.calls.schema))
    text = grammar_text(structure)
    if structure.grammar is None or "<" not in structure.grammar:
        _dry_run(structure.kind, text, LLTokenizer("byte"))
    # A grammar may name tokens of the model, such as <|end|>, which only the engine can check.
    elif error := _with_large_stack(lambda: LLMatcher.validate_grammar(text, limits=_limits())):
        raise _refusal(structure.kind, error)


def grammar_text(structure: StructuredOutputs) -> str:
    """Converts a structure to llguidance's notation. Raises a RequestError if the text is malformed."""
    from llguidance import LLMatcher

    limit = MAX_GRAMMAR if structure.grammar is not None else MAX_TEXT
    if _is_longer(structure, limit):
        message = f"has far more than {limit} characters, and at most {limit} are allowed"
        raise RequestError(f"structured_outputs.{structure.kind} {message}")
    source = _source(structure)
    if len(source) > limit:
        raise RequestError(
            f"structured_outputs.{structure.kind} has {len(source)} characters, and at most {limit} are allowed"
        )
    try:
        source.encode()
        if structure.regex is not None:
            return LLMatcher.grammar_from_regex(source)
        if structure.grammar is not None and _GBNF.search(source):
            return LLMatcher.grammar_from_lark(_from_gbnf(source))
        if structure.grammar is not None or structure.choice is not None:
            return LLMatcher.grammar_from_lark(source)
        guidance = structure.json.get("x-guidance") if isinstance(structure.json, dict) else None
        if isinstance(guidance, dict) and guidance.get("whitespace_flexible") is False:
            return LLMatcher.grammar_from_json_schema(source)  # a whitespace_pattern would override it
        return LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": WHITE_SPACE})
    except (ValueError, RecursionError) as error:
        raise _refusal(structure.kind, str(error)) from None


class NoMatcherError(Exception):
    """The matcher of one sequence cannot be built. Other sequences are not affected."""


class CompiledGrammar:
    """A grammar in llguidance's notation, with a model's tokenizer. Requests with equal structures share it."""

    def __init__(self, text: str, tokenizer: "LLTokenizer") -> None:
        self.text, self.tokenizer = text, tokenizer
        self._lock = threading.Lock()
        self._first: Mask | None = None
        self._spare: LLMatcher | None = None  # built for the first mask; the first request gets it

    def matcher(self) -> "LLMatcher":
        with self._lock:
            spare, self._spare = self._spare, None
        return spare or self._make()

    def _make(self) -> "LLMatcher":
        try:
            return _with_large_stack(lambda: _matcher(self.text, self.tokenizer))
        except (RuntimeError, MemoryError) as error:  # no thread, or no memory
            raise NoMatcherError(f"no matcher could be made: {error}") from error

    @property
    def has_first_mask(self) -> bool:
        return self._first is not None

    def first_mask(self) -> Mask:
        """The mask of the first token. It is the same for all requests, so that waiting requests need no matcher."""
        with self._lock:
            if self._first is None:
                self._spare = self._make()
                self._first = _mask(self._spare, self.tokenizer.vocab_size)
            return self._first


class RequestGrammar:
    """A compiled grammar, and the matcher that follows one sequence through it.

    Each sequence has a separate matcher. (Copies of a matcher would share the states of its lexer and their limit. One
    request could then make another one fail.) The matcher is built while the first token is computed. A matcher of a
    large schema takes 30 ms and 0.4 MB, so a waiting request has none.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self._lock = threading.Lock()
        self._matcher: LLMatcher | None = None

    def prepare(self) -> "LLMatcher":
        """Returns the matcher; builds it if there is none yet."""
        with self._lock:
            if self._matcher is None:
                self._matcher = self.compiled.matcher()
            return self._matcher

    def is_ready(self, token: int | None) -> bool:
        """Whether the mask after this token (None: the first mask) can be computed without building a matcher."""
        return self.compiled.has_first_mask if token is None else self._matcher is not None

    def mask(self, token: int | None) -> Mask:
        """Tokens allowed after `token`, the last token of the output. None: tokens allowed at the start."""
        if token is None:
            return self.compiled.first_mask()
        # A matcher that fails, because its grammar became too complex, allows only the end of text from now on.
        matcher = self.prepare()
        matcher.consume_token(token)
        return _mask(matcher, self.compiled.tokenizer.vocab_size)


class Grammars:
    """Compiles structures for one model. Thread-safe.

    The tokenizer is read on first use, which takes a second if it is large. Valid structures are remembered; compiling
    one again takes a millisecond.
    """

    def __init__(self, path: Path, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        self.path = path
        self.vocab_size = vocab_size  # of the model; the tokenizer may have more or fewer tokens
        self.end_ids = tuple(dict.fromkeys(end_ids))
        self._checked = functools.lru_cache(CACHED_GRAMMARS)(self._check)
        self._compiled = functools.lru_cache(CACHED_GRAMMARS)(lambda text: CompiledGrammar(text, self.tokenizer))
        # Set when the tokenizer is read: thinking tags that are single tokens, and the ids of special tokens.
        self._tags: frozenset[str] = frozenset()
        self._special: dict[str, int] = {}

    def check(self, structure: StructuredOutputs) -> None:
        """Raises a RequestError if the structure cannot be enforced."""
        self._checked(structure.kind, grammar_text(structure))

    def compile(self, structure: StructuredOutputs, count: int = 1) -> list[RequestGrammar]:
        """Returns grammars for `count` requests. Raises a RequestError if the structure cannot be enforced."""
        text = grammar_text(structure)
        self._checked(structure.kind, text)
        if structure.calls is not None:
            text = _reply_or_calls(structure.calls, text, self._special)
            self._checked(structure.kind, text)
        if structure.behind is not None:
            text = _after_reasoning(structure.behind, text, self._tags)
            self._checked(structure.kind, text)
        compiled = self._compiled(text)
        return [RequestGrammar(compiled) for _ in range(count)]

    @functools.cached_property
    def tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise RequestError(f"{self.path} has no tokenizer.json, so no structure can be kept to: ask for none")
        if not self.end_ids:
            raise RequestError(f"{self.path} names no end-of-text token, so no structure could end: ask for none")
        try:
            tokens = Tokenizer.from_file(str(file))
            # An end-of-text token that is not marked special would count as text and be allowed inside a string.
            ends = [token for end in self.end_ids if (token := tokens.id_to_token(end)) is not None]
            tags = [tag for tag in TAGS if tokens.token_to_id(tag) is not None]
            tokens.add_special_tokens([*ends, *tags])
            self._tags = frozenset(tags)
            added = tokens.get_added_tokens_decoder().items()
            self._special = {token.content: number for number, token in added if token.special}
            tokens.no_truncation()
            tokens.no_padding()
            size = max(self.vocab_size, 1 + max(tokens.get_vocab(with_added_tokens=True).values()))
            return LLTokenizer(tokens.to_str(), n_vocab=size, eos_token=list(self.end_ids))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise RequestError(f"{file} cannot be used for structured output: {_one_line(str(error))}") from error

    def _check(self, kind: str, text: str) -> None:
        _dry_run(kind, text, self.tokenizer)


def _is_longer(structure: StructuredOutputs, limit: int) -> bool:
    """Whether the structure's text is certainly too long. Stops early; json.dumps of all of it would hold the GIL."""
    if isinstance(structure.json, str):
        return len(structure.json) > WHITE_SPACE_FACTOR * limit
    waiting: list[object] = [structure.json if structure.json is not None else structure.choice]
    size = 0
    while waiting and size <= limit:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, dict | list | tuple):
            size += 2 * len(value)  # at least a value and a comma
            if size <= limit:
                waiting += [*value, *value.values()] if isinstance(value, dict) else value
    return size > limit


def _check_counts(schema: object) -> None:
    """Refuses schemas with large numbers or counts: they are short to write, but the work grows with them."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        waiting += value.values()
        step = value.get("multipleOf")
        if isinstance(step, int | float) and not isinstance(step, bool) and math.isfinite(step):
            digits = int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits)))
            if digits > MAX_MULTIPLE:
                raise _refusal(
                    "json",
                    f"multipleOf {step} is {digits} without zeros at its end, and at most {MAX_MULTIPLE} is allowed",
                )
        patterns = value.get("patternProperties")
        if isinstance(patterns, dict) and len(patterns) > MAX_PATTERNS:
            raise _refusal(
                "json", f"patternProperties has {len(patterns)} patterns, and at most {MAX_PATTERNS} are allowed"
            )


def _source(structure: StructuredOutputs) -> str:
    """The text of the structure."""
    if structure.json_object:
        return '{"type": "object"}'
    if structure.json is not None:
        try:
            # Always parsed: llguidance pastes the text of a schema into its notation unchecked.
            schema = json.loads(structure.json) if isinstance(structure.json, str) else structure.json
            _check_counts(schema)
            return json.dumps(closed(schema), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (ValueError, TypeError, RecursionError) as error:
            raise _refusal("json", f"it is not JSON ({error})") from None
    if structure.choice is not None:
        # One terminal, matched as a regex: a rule with thousands of alternatives would exceed the limits.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, structure.choice))
    return structure.regex or structure.grammar or ""


def _after_reasoning(thoughts: Thoughts, text: str, tokens: frozenset[str]) -> str:
    """The grammar of a thought followed by a reply that matches `text`.

    `tokens` are the tags that are single tokens: no text of the reply can be mistaken for one.
    """
    start, end = thoughts.start, thoughts.end
    begin = start if start in tokens else json.dumps(start)
    inside = "inside: /(?s:.*)/" if end in tokens else f"inside[suffix={json.dumps(end)}]: /(?s:.*)/"
    lines = [
        f"start: {'thought' if thoughts.starts_in_prompt else 'whole?'} @reply",
        f"whole: {begin} thought",
        f"thought: inside {end if end in tokens else ''} space",
        inside,
        r"space: /[ \n]{0,4}/",
    ]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *_named("reply", text)]})


def _reply_or_calls(calls: Calls, text: str, special: dict[str, int]) -> str:
    """The grammar of either a reply that matches `text`, or tool calls. No text can spell the `special` tokens."""
    start, end = (
        f"<[{special[mark]}]>" if mark in special else json.dumps(mark) if mark else ""
        for mark in (calls.start, calls.end)
    )
    gap = "space" if calls.start else ""
    lines = [
        "start: @form | call" + (" (space call)*" if calls.many else ""),
        f"call: {start} {gap} @call " + (f"space {end}" if end else ""),
        r"space: /[ \n]{0,4}/",
    ]
    schema = grammar_text(StructuredOutputs(json=calls.schema))
    grammars = [{"lark_grammar": "\n".join(lines)}, *_named("form", text), *_named("call", schema)]
    return json.dumps({"grammars": grammars})


def _named(name: str, text: str) -> list[dict[str, Any]]:
    """The parts of a grammar, with the first part named `name`."""
    found: list[dict[str, Any]] = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    found[0]["name"] = name
    return found


_GBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    rules = text.count("::=")
    if rules > MAX_GBNF_RULES:
        raise ValueError(f"it has {rules} rules, and at most {MAX_GBNF_RULES} are allowed in GBNF; Lark may have more")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # gbnf_to_lark raises bare Exceptions
        raise ValueError(f"it is not GBNF: {error}") from None


def _dry_run(kind: str, text: str, tokenizer: "LLTokenizer") -> None:
    """Generates up to DRY_RUN_TOKENS tokens and raises a RequestError if the grammar fails."""
    matcher = _with_large_stack(lambda: _matcher(text, tokenizer))
    for _ in range(DRY_RUN_TOKENS):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise _refusal(kind, matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        further = allowed[~np.isin(allowed, tokenizer.eos_tokens)]
        if not len(further):
            return
        matcher.consume_token(int(further[-1]))


def _mask(matcher: "LLMatcher", vocab_size: int) -> Mask:
    found: Mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: -(-vocab_size // 32)]
    return found


def _matcher(text: str, tokenizer: "LLTokenizer") -> "LLMatcher":
    from llguidance import LLMatcher

    return LLMatcher(tokenizer, text, log_level=0, limits=_limits())


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=500,  # enough for an object with 120 optional properties
        initial_lexer_fuel=200_000,
        max_lexer_states=50_000,  # 1 to 2 kB each
        verbose_errors=False,
    )


def _with_large_stack(work: Callable[[], _T]) -> _T:
    """Runs `work` on a thread with a large stack.

    llguidance follows references by recursion. A chain of a thousand would overflow an ordinary stack and kill the
    process.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="weft-grammar") as pool:
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                pending = pool.submit(work)
            finally:
                threading.stack_size(before)
        return pending.result()


_starting = threading.Lock()  # threading.stack_size is global


def _refusal(kind: str, error: str) -> RequestError:
    # llguidance quotes the grammar after the reason; the regex crate quotes the regex before it.
    reason = re.split(r"\n *\d+ \| |<non-verbose/>", error)[0]
    _, found, tail = reason.rpartition("\nerror: ")
    if found:
        reason = f"regex parse error: {tail}"
    if "NoExtension" in reason:
        reason = "no text satisfies it"
    if "Unimplemented keys" in reason:
        reason += '; "x-guidance": {"lenient": true} in the schema leaves them out'
    return RequestError(f"structured_outputs.{kind} cannot be used: {_one_line(reason)}")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."
