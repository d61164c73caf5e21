"""Reasoning in tags: owns the border between what a model thinks and what it says, <think>...</think> before a reply.

Only the first thought of a reply is taken for one: a tag that comes later is text, as an answer may be about tags.
"""

from typing import NamedTuple

from weft.errors import OptionError


class Thought(NamedTuple):
    reasoning: str
    content: str


class Style(NamedTuple):
    """How a model family thinks."""

    start: str
    end: str
    open: bool  # whether a reply begins inside the tags even if neither the prompt nor the model wrote the first one


REASONING_PARSERS = {
    "deepseek_r1": Style("<think>", "</think>", open=True),
    "qwen3": Style("<think>", "</think>", open=False),
}


class Place(NamedTuple):
    """Where the reply to a prompt stands: chat templates often write a tag, or both, themselves."""

    open: bool  # inside the tags
    over: bool  # behind them


def place_of(name: str, prompt_end: str, begun: str | None = None) -> Place:
    """`begun`: what the reply already consists of, where it goes on with a message that is not finished."""
    start, end, open = REASONING_PARSERS[name]
    if begun is not None:
        thinks = begun.rfind(start) > begun.rfind(end)
        return Place(thinks, not thinks)
    prompt_end = prompt_end.rstrip()
    over = prompt_end.endswith(end)
    return Place(prompt_end.endswith(start) or (open and not over), over)


def make_reasoning_parser(name: str, prompt_end: str, begun: str | None = None) -> "ReasoningParser":
    """A parser for one reply to a prompt with this end."""
    if name not in REASONING_PARSERS:
        raise OptionError(f"reasoning_parser={name!r} is unknown: choose {', '.join(REASONING_PARSERS)}")
    start, end, _ = REASONING_PARSERS[name]
    place = place_of(name, prompt_end, begun)
    # A prompt with an empty thought is not always believed: the model may think all the same.
    return ReasoningParser(start, end, place.open, over=begun is not None and place.over)


def detect_reasoning(template: str) -> str | None:
    """How the model of this chat template, given as its source text, thinks; None if it does not, or differently."""
    if "</think>" not in template:
        return None
    # DeepSeek's later models think on demand only, and their prompts say so.
    return "deepseek_r1" if "<｜Assistant｜>" in template and "thinking" not in template else "qwen3"


class ReasoningParser:
    """Splits the text of one reply. Tags, and newlines right behind them, are in neither part."""

    def __init__(self, start: str = "<think>", end: str = "</think>", open: bool = False, over: bool = False):
        """`open`: the reply begins inside the tags; it may repeat the first one. `over`: it begins behind them."""
        self._start = start
        self._end = end
        self._thinking = open
        self._beginning = not over  # nothing but whitespace and a part of the first tag has come
        self._behind_tag = open  # nothing but newlines has come since
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        """Whether the reply is inside the tags, as far as it is known."""
        return self._thinking

    def push(self, text: str) -> Thought:
        """Takes the next piece of text, cut anywhere; returns what is not a part of a tag."""
        return self._split(text, final=False)

    def flush(self) -> Thought:
        """The end of the reply: what was held back and is no tag after all."""
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
    """The text, and the end of it that could be the beginning of the tag."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size], text[-size:]
    return text, ""
