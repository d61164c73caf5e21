"""Reasoning in tags: separates a model's thoughts, <think>...</think>, from the reply that follows them.

Only the first thought of a reply counts. A tag that comes later is text, because an answer may be about tags.
"""

from typing import NamedTuple

from weft.errors import OptionError


class Thought(NamedTuple):
    reasoning: str
    content: str


class Style(NamedTuple):
    """How a model family marks its thoughts."""

    start: str
    end: str
    open: bool  # whether a reply begins inside the tags even if neither the prompt nor the model wrote the start tag


REASONING_PARSERS = {
    "deepseek_r1": Style("<think>", "</think>", open=True),
    "qwen3": Style("<think>", "</think>", open=False),
}


class Place(NamedTuple):
    """Where the reply to a prompt begins. Chat templates often write a tag, or both, into the prompt."""

    open: bool  # inside the tags
    over: bool  # after them


def place_of(name: str, prompt_end: str, begun: str | None = None) -> Place:
    """Where the reply to a prompt begins. `begun`: its text so far, if the reply continues an unfinished message."""
    start, end, open = REASONING_PARSERS[name]
    if begun is not None:
        thinks = begun.rfind(start) > begun.rfind(end)
        return Place(thinks, not thinks)
    prompt_end = prompt_end.rstrip()
    over = prompt_end.endswith(end)
    return Place(prompt_end.endswith(start) or (open and not over), over)


def make_reasoning_parser(name: str, prompt_end: str, begun: str | None = None) -> "ReasoningParser":
    """A parser for one reply to a prompt that ends with `prompt_end`."""
    if name not in REASONING_PARSERS:
        raise OptionError(f"reasoning_parser={name!r} is unknown: choose {', '.join(REASONING_PARSERS)}")
    start, end, _ = REASONING_PARSERS[name]
    place = place_of(name, prompt_end, begun)
    # An empty thought in the prompt does not count as over: the model may think all the same.
    return ReasoningParser(start, end, place.open, over=begun is not None and place.over)


def detect_reasoning(template: str) -> str | None:
    """The reasoning style of a chat template, given as its source text; None if it has no known style."""
    if "</think>" not in template:
        return None
    # DeepSeek's later models think only on demand, and their templates say so.
    return "deepseek_r1" if "<｜Assistant｜>" in template and "thinking" not in template else "qwen3"


class ReasoningParser:
    """Splits the text of one reply. Tags, and newlines right after them, are in neither part."""

    def __init__(self, start: str = "<think>", end: str = "</think>", open: bool = False, over: bool = False):
        """`open`: the reply begins inside the tags, and may repeat the start tag. `over`: it begins after the tags."""
        self._start = start
        self._end = end
        self._thinking = open
        self._beginning = not over  # only whitespace and a part of the start tag have come so far
        self._behind_tag = open  # only newlines have come since a tag
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        """Whether the reply is inside the tags, as far as is known."""
        return self._thinking

    def push(self, text: str) -> Thought:
        """Takes the next piece of text, cut anywhere. Returns what is not part of a tag."""
        return self._split(text, final=False)

    def flush(self) -> Thought:
        """Ends the reply: returns held text that is no tag after all."""
        return self._split("", final=True)

    def _split(self, text: str, final: bool) -> Thought:
        text, self._held = self._held + text, ""
        if self._beginning:
            word = text.lstrip()
            if word != self._start and self._start.startswith(word) and not final:
                self._held = text
                return Thought("", "")
            self._beginning = False
            if word.startswith(self._start):
                self._thinking = self._behind_tag = True
                text = word.removeprefix(self._start)
        reasoning = ""
        if self._thinking:
            reasoning, tag, text = text.partition(self._end)
            if not tag and not final:
                reasoning, self._held = _hold_back(reasoning, self._end)
            reasoning = self._trim(reasoning)
            if tag:
                self._thinking, self._behind_tag = False, True
        return Thought(reasoning, self._trim(text))

    def _trim(self, text: str) -> str:
        if self._behind_tag:
            text = text.lstrip("\n")
            self._behind_tag = not text
        return text


def _hold_back(text: str, tag: str) -> tuple[str, str]:
    """Splits off the end of the text that could be the beginning of the tag."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size], text[-size:]
    return text, ""
