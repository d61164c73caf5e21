"""Reasoning in tags: separates a model's reasoning, <think>...</think>, from the content that follows it.

Only the first pair of tags in a reply counts. A tag that comes later is content, because an answer may be about tags.
"""

from typing import NamedTuple

from weft.errors import OptionError


class ReasoningDelta(NamedTuple):
    """What a piece of text adds to the two parts of a reply."""

    reasoning: str
    content: str


class ReasoningFormat(NamedTuple):
    """How a model family marks its reasoning."""

    start: str
    end: str
    always_reasons: bool  # a reply begins inside the tags, even if neither the prompt nor the model wrote the start tag


REASONING_PARSERS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always_reasons=True),
    "qwen3": ReasoningFormat("<think>", "</think>", always_reasons=False),
}


class ReasoningState(NamedTuple):
    """Where the reply to a prompt begins. Chat templates often write a tag, or both, into the prompt."""

    is_inside: bool  # between the tags
    is_over: bool  # after the end tag


def initial_state(name: str, prompt_end: str, begun: str | None = None) -> ReasoningState:
    """Where the reply to a prompt begins. `begun`: its text so far, if the reply continues an unfinished message."""
    start, end, always_reasons = REASONING_PARSERS[name]
    if begun is not None:
        is_inside = begun.rfind(start) > begun.rfind(end)
        return ReasoningState(is_inside, not is_inside)
    prompt_end = prompt_end.rstrip()
    is_over = prompt_end.endswith(end)
    return ReasoningState(prompt_end.endswith(start) or (always_reasons and not is_over), is_over)


def make_reasoning_parser(name: str, prompt_end: str, begun: str | None = None) -> "ReasoningParser":
    """A parser for one reply to a prompt that ends with `prompt_end`."""
    if name not in REASONING_PARSERS:
        raise OptionError(f"reasoning_parser={name!r} is unknown: choose {', '.join(REASONING_PARSERS)}")
    start, end, _ = REASONING_PARSERS[name]
    state = initial_state(name, prompt_end, begun)
    # If the prompt ends with empty reasoning, the model may still start its own.
    return ReasoningParser(start, end, state.is_inside, is_over=begun is not None and state.is_over)


def detect_reasoning(template: str) -> str | None:
    """The reasoning format of a chat template, given as its source text; None if it has no known format."""
    if "</think>" not in template:
        return None
    # DeepSeek's later models think only on demand, and their templates say so.
    return "deepseek_r1" if "<｜Assistant｜>" in template and "thinking" not in template else "qwen3"


class ReasoningParser:
    """Splits the text of one reply. Tags, and newlines right after them, are in neither part."""

    def __init__(self, start: str = "<think>", end: str = "</think>", is_inside: bool = False, is_over: bool = False):
        """`is_inside`: the reply begins inside the tags, and may repeat the first. `is_over`: it begins after both."""
        self._start = start
        self._end = end
        self._is_inside = is_inside
        self._is_beginning = not is_over  # only whitespace and a part of the start tag have come so far
        self._is_after_tag = is_inside  # only newlines have come since a tag
        self._held_back = ""

    @property
    def is_thinking(self) -> bool:
        """Whether the reply is inside the tags, as far as is known."""
        return self._is_inside

    def push(self, text: str) -> ReasoningDelta:
        """Takes the next piece of text, cut anywhere. Returns what is not part of a tag."""
        return self._split(text, final=False)

    def flush(self) -> ReasoningDelta:
        """Ends the reply: returns held text that is no tag after all."""
        return self._split("", final=True)

    def _split(self, text: str, final: bool) -> ReasoningDelta:
        text, self._held_back = self._held_back + text, ""
        if self._is_beginning:
            word = text.lstrip()
            if word != self._start and self._start.startswith(word) and not final:
                self._held_back = text
                return ReasoningDelta("", "")
            self._is_beginning = False
            if word.startswith(self._start):
                self._is_inside = self._is_after_tag = True
                text = word.removeprefix(self._start)
        reasoning = ""
        if self._is_inside:
            reasoning, tag, text = text.partition(self._end)
            if not tag and not final:
                reasoning, self._held_back = _hold_back(reasoning, self._end)
            reasoning = self._trim(reasoning)
            if tag:
                self._is_inside, self._is_after_tag = False, True
        return ReasoningDelta(reasoning, self._trim(text))

    def _trim(self, text: str) -> str:
        if self._is_after_tag:
            text = text.lstrip("\n")
            self._is_after_tag = not text
        return text


def _hold_back(text: str, tag: str) -> tuple[str, str]:
    """Splits off the end of the text that could be the beginning of the tag."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size], text[-size:]
    return text, ""
