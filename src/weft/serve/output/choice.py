"""Choice: the visible output of one sequence: text, reasoning, tool calls, log probabilities and finish reason."""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.engine.executor import TokenLogprobs
from weft.engine.params import SamplingParams
from weft.serve.engines.request_output_collector import SequenceUpdate
from weft.serve.output.token_offsets import TokenOffsets, WithheldLogprobs
from weft.text.reasoning import ReasoningParser
from weft.text.text_stream import TextStream
from weft.text.tokenizer import Tokenizer
from weft.text.tools import ToolCallDelta, ToolParser, make_tool_parser

NO_CALLS: list[ToolCallDelta] = []
NO_LOGPROBS: list[TokenLogprobs] = []


class ChoiceDelta(NamedTuple):
    """The output that one token adds."""

    text: str
    reasoning: str
    calls: list[ToolCallDelta]
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: str | None  # set on the last delta
    offset: int = 0  # character where the token starts in the text; only set with logprobs
    text_logprobs: Sequence[TokenLogprobs] = NO_LOGPROBS  # of the tokens in `text`, which may include earlier tokens

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show, such as for a token that is only part of a character."""
        return not (self.text or self.reasoning or self.calls or self.finish_reason or self.logprobs)


class Choice:
    """The output so far. `append` adds an update and returns the new part, for streaming."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        prompt_logprobs: dict[int, TokenLogprobs] | None = None,
        reasoning: ReasoningParser | None = None,
        tools: "ToolParser | NamedToolCallParser | RequiredToolCallsParser | None" = None,
        single: bool = False,
    ) -> None:
        """With `single`, only the first of several tool calls is returned."""
        self.index = index
        self._texts: list[str] = []  # a list: appending to one long string would copy it for every token
        self._reasoning_texts: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # of all output tokens
        self.offsets: list[int] = []  # of each token: where it starts in the text, before a stop string cuts that
        self.text_logprobs: list[TokenLogprobs] = []  # of tokens in visible text only: no reasoning, no tool calls
        # By position, because a preempted request may send a position twice.
        self.prompt_logprobs: dict[int, TokenLogprobs] = {} if prompt_logprobs is None else prompt_logprobs
        self.finish_reason: str | None = None
        self.reasoning_tokens = 0
        self.stop_reason: str | int | None = None  # the stop string or stop token id that ended the choice
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._reasoning, self._tools = reasoning, tools
        self._plain = reasoning is None and tools is None
        self._single = single
        self._text_stream: TextStream | None = None
        self._token_offsets: TokenOffsets | None = None
        if tokenizer is not None:
            skip = params.skip_special_tokens and not (tools and tools.needs_special_tokens)
            self._hidden = tokenizer.special_token_ids if skip else frozenset()
            self._shows_stop = params.include_stop_str_in_output
            self._text_stream = TextStream(
                tokenizer,
                prompt,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=skip,
                min_tokens=params.min_tokens,
            )
            if params.logprobs is not None:
                self._token_offsets, self._withheld = (
                    TokenOffsets(tokenizer, skip, prompt),
                    WithheldLogprobs(self._plain),
                )

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning_texts)

    def append(self, update: SequenceUpdate) -> ChoiceDelta:
        """Adds one update and returns what it adds. The choice is over if the delta has a `finish_reason`."""
        token = update.token
        reason = update.end.reason if update.end is not None else None
        text = ""
        if token is not None:
            self.tokens.append(token)
            if update.logprobs is not None:
                self.logprobs.append(update.logprobs)
                self.offsets.append(self._measure(token, update.logprobs, reason))
            if self._text_stream is not None:
                text = self._text_stream.push(token, reason)
                if self._text_stream.stopped is not None:
                    reason, self.stop_reason = "stop", self._text_stream.stopped
            if reason == "stop" and self.stop_reason is None and token in self._stop_ids:
                self.stop_reason = token
        delta = ChoiceDelta(text, "", NO_CALLS, token, update.logprobs, reason)
        if not self._plain:
            delta = self._split(delta)
        self._texts.append(delta.text)
        self.finish_reason = delta.finish_reason
        return delta if self._token_offsets is None else self._with_logprobs(delta)

    def _measure(self, token: int, found: TokenLogprobs, reason: str | None) -> int:
        """Where a token starts in the text. Keeps its log probabilities until its text is shown."""
        if self._token_offsets is None:
            return 0
        if reason == "stop" and not self._shows_stop:  # the stop token itself is not part of the text
            self._withheld.add_text(self._token_offsets.end())
            return self._token_offsets.length
        start, text = self._token_offsets.push(token)
        if token not in self._hidden:
            self._withheld.add(start, text, found)
        if reason is not None:
            self._withheld.add_text(self._token_offsets.end())
        return start

    def _with_logprobs(self, delta: ChoiceDelta) -> ChoiceDelta:
        """The delta with the log probabilities of its text and the offset of its token."""
        if delta.reasoning:
            self._withheld.release(delta.reasoning)
        text_logprobs = self._withheld.release(delta.text) if delta.text else []
        if delta.calls:
            self._withheld.clear()
        self.text_logprobs += text_logprobs
        offset = self.offsets[-1] if delta.logprobs is not None else 0
        return delta._replace(offset=offset, text_logprobs=text_logprobs)

    def _split(self, delta: ChoiceDelta) -> ChoiceDelta:
        """Splits the text of a delta into reasoning, visible text and tool calls."""
        text, thought, reason = delta.text, "", delta.finish_reason
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
            if delta.token is not None and (self._reasoning.is_thinking or (thought and not text)):
                self.reasoning_tokens += 1
            if reason is not None:
                rest = self._reasoning.flush()
                thought, text = thought + rest.reasoning, text + rest.content
        calls: list[ToolCallDelta] = []
        if self._tools is not None:
            text, calls = self._tools.push(text)
            if reason is not None:
                rest_of_text, more = self._tools.flush()
                text, calls = text + rest_of_text, calls + more
        if self._single and calls and calls[-1].index > 0:  # a second call starts, so the first is complete: end here
            calls, reason = [call for call in calls if call.index == 0], "tool_calls"
        for call in calls:
            self._add_call(call)
        if reason == "stop" and self.calls and not isinstance(self._tools, NamedToolCallParser):
            reason = "tool_calls"
        self._reasoning_texts.append(thought)
        return ChoiceDelta(text, thought, calls, delta.token, delta.logprobs, reason)

    def _add_call(self, call: ToolCallDelta) -> None:
        if call.index == len(self.calls):
            self.calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
        self.calls[call.index]["function"]["arguments"] += call.arguments


class RequiredToolCallsParser:
    """Parser for a reply that must be a JSON list of tool calls. A call that is cut off is never shown as text."""

    needs_special_tokens = False

    def __init__(self) -> None:
        self._parser = make_tool_parser("mistral")  # Mistral's format is this list after a marker, pushed next
        self._parser.push("[TOOL_CALLS]")

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        return "", self._parser.push(text).calls

    def flush(self) -> tuple[str, list[ToolCallDelta]]:
        return "", self._parser.flush().calls


class NamedToolCallParser:
    """Parser for a reply that must be the arguments of the one function that the client chose."""

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
