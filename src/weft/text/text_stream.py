"""TextStream: turns the tokens of one completion into visible text, up to a stop string."""

from collections.abc import Sequence

from weft.text.detokenizer import StreamDetokenizer
from weft.text.stops import StopStrings
from weft.text.tokenizer import Tokenizer


class TextStream:
    """Detokenizes the tokens of one completion, and looks for stop strings in its text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens, prompt)
        self._stops = StopStrings(stop, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that matched, if any."""
        return self._stops.stopped

    def push(self, token: int, finish_reason: str | None = None) -> str:
        """Takes the next token and returns text that may be shown. With a finish reason, returns all remaining text."""
        self._tokens += 1
        # The token that ends a text is not part of it, unless the caller wants to include it.
        hidden = finish_reason == "stop" and not self._include_stop
        text = "" if hidden else self._detokenizer.push_one(token)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        shown = self._stops.push(text, active=self._tokens > self._min_tokens)
        return shown + self._stops.flush() if finish_reason is not None else shown
