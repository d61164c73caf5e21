"""Choice: what a client sees of one stream: text, reasoning, tool calls, log probabilities, and why it ended."""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.engine.executor import TokenLogprobs
from weft.engine.params import SamplingParams
from weft.serve.client import Update
from weft.text.output import TextStream
from weft.text.reasoning import ReasoningParser
from weft.text.tokenizer import Tokenizer
from weft.text.tools import ToolCallDelta, ToolParser, make_tool_parser

NO_CALLS: list[ToolCallDelta] = []


class Piece(NamedTuple):
    """What one token adds."""

    text: str
    reasoning: str
    calls: list[ToolCallDelta]
    token: int | None
    logprobs: TokenLogprobs | None
    reason: str | None  # with the last piece

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show, as for a token that is a part of a character."""
        return not (self.text or self.reasoning or self.calls or self.reason or self.logprobs)


class Choice:
    """Grows with every update; `take` returns what is new, for those who stream."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        prompt_logprobs: dict[int, TokenLogprobs] | None = None,
        reasoning: ReasoningParser | None = None,
        tools: "ToolParser | ForcedCall | ForcedCalls | None" = None,
        single: bool = False,
    ) -> None:
        """`single`: of several calls only the first is let through."""
        self.index = index
        self._texts: list[str] = []  # pieces: adding to one long text would copy it for every token
        self._thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        # By position; a preemption may bring one twice.
        self.prompt_logprobs: dict[int, TokenLogprobs] = {} if prompt_logprobs is None else prompt_logprobs
        self.reason: str | None = None
        self.stop_reason: str | int | None = None  # the stop string or the stop token that ended it
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._reasoning, self._tools = reasoning, tools
        self._plain = reasoning is None and tools is None
        self._single = single
        self._words = None
        if tokenizer is not None:
            self._words = TextStream(
                tokenizer,
                prompt,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens and not (tools and tools.needs_special_tokens),
                min_tokens=params.min_tokens,
            )

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._thoughts)

    def take(self, update: Update) -> Piece:
        """One token, perhaps the last: `reason` of the result says that the choice is over."""
        token = update.token
        reason = update.end.reason if update.end is not None else None
        text = ""
        if token is not None:
            self.tokens.append(token)
            if update.logprobs is not None:
                self.logprobs.append(update.logprobs)
            if self._words is not None:
                text = self._words.push(token, reason)
                if self._words.stopped is not None:
                    reason, self.stop_reason = "stop", self._words.stopped
            if reason == "stop" and self.stop_reason is None and token in self._stop_ids:
                self.stop_reason = token
        if self._plain:
            self._texts.append(text)
            self.reason = reason
            return Piece(text, "", NO_CALLS, token, update.logprobs, reason)
        return self._sort(text, token, update.logprobs, reason)

    def _sort(self, text: str, token: int | None, logprobs: TokenLogprobs | None, reason: str | None) -> Piece:
        """Thoughts and tool calls apart from what is meant to be read."""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            if reason is not None:
                rest = self._reasoning.flush()
                thought, text = thought + rest.reasoning, text + rest.content
        calls: list[ToolCallDelta] = []
        if self._tools is not None:
            text, calls = self._tools.push(text)
            if reason is not None:
                rest_of_text, more = self._tools.flush()
                text, calls = text + rest_of_text, calls + more
        if self._single:
            calls = [call for call in calls if call.index == 0]
        for call in calls:
            self._note(call)
        if reason == "stop" and self.calls and not isinstance(self._tools, ForcedCall):
            reason = "tool_calls"
        self._texts.append(text)
        self._thoughts.append(thought)
        self.reason = reason
        return Piece(text, thought, calls, token, logprobs, reason)

    def _note(self, call: ToolCallDelta) -> None:
        if call.index == len(self.calls):
            self.calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
        self.calls[call.index]["function"]["arguments"] += call.arguments


class ForcedCalls:
    """A reply that can only be a JSON list of calls; what is cut off in the middle is no text for the reader."""

    needs_special_tokens = False

    def __init__(self) -> None:
        self._parser = make_tool_parser("mistral")  # its calls are such a list behind a marker, which we put there
        self._parser.push("[TOOL_CALLS]")

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        return "", self._parser.push(text).calls

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        return "", self._parser.flush().calls


class ForcedCall:
    """A reply that can only be the arguments of one function, as the client has chosen it."""

    needs_special_tokens = False

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        if not text:
            return "", []
        name, self._name = self._name, None
        return "", [ToolCallDelta(0, f"call_{secrets.token_hex(12)}" if name else None, name, text)]

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        return "", []
