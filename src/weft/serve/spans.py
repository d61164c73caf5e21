"""Which part of a text its tokens are: for those who ask for log probabilities, and for nobody else."""

import codecs
from collections.abc import Sequence

from weft.engine.executor import TokenLogprobs
from weft.text.detokenizer import StreamDetokenizer
from weft.text.tokenizer import Tokenizer


class Ruler:
    """Says where each token of a growing text begins, in characters.

    Tokens that make a character together all begin where it does. One that is not shown begins where the next does.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens, context)
        self.length = 0  # of the text so far, without a character that is not finished

    def push(self, token: int) -> tuple[int, str]:
        """Where a token begins, and the text that has become final with it."""
        before, text = self.length, self._detokenizer.push_one(token)
        self.length += len(text)
        spelling = self._tokenizer.token_bytes(token)
        if 0x80 <= spelling[:1].ljust(1)[0] < 0xC0:
            return before, text  # goes on with a character
        own = self._tokenizer.whole_text(token)
        if own is None:  # its last character is not finished
            own = codecs.utf_8_decode(spelling, "replace", False)[0]
        # Before its own text there may be the remains of a character that it does not go on with.
        return max(before, self.length - len(own)), text

    def end(self) -> str:
        """What is left of a character that is not finished."""
        text = self._detokenizer.flush()
        self.length += len(text)
        return text


class Unshown:
    """Log probabilities of tokens whose text has not been shown yet, as stop strings and tags keep it back.

    Of the tokens of tags nothing is ever shown, nor of the one that ends a text.
    """

    def __init__(self, in_order: bool) -> None:
        """`in_order`: the whole text is shown; else there are parts that are not, or elsewhere."""
        self._in_order = in_order
        self._text = ""
        self._start = 0  # where it begins in all of the text
        self._tokens: list[tuple[int, int, TokenLogprobs]] = []  # with where they begin and end

    def add(self, start: int, text: str, found: TokenLogprobs) -> None:
        """A token that begins at `start`; `text` has become final with it."""
        self._text += text
        end = self._start + len(self._text)
        self._tokens.append((start, max(end, start + 1), found))

    def add_text(self, text: str) -> None:
        """Text that comes with no token that is shown."""
        self._text += text

    def take(self, shown: str) -> list[TokenLogprobs]:
        """Those of the tokens of a text that is shown now; what came before it is forgotten."""
        # What is not shown, as a tag, comes before what is; what is kept back behind it is the beginning of a tag.
        place = 0 if self._in_order else self._text.rfind(shown)
        if place < 0:  # somebody has changed it
            place, shown = 0, self._text
        start = self._start + place
        end = start + len(shown)
        taken = [found for first, last, found in self._tokens if first < end and last > start]
        self._tokens = [token for token in self._tokens if token[0] >= end]
        self._text = self._text[place + len(shown) :]
        self._start = end
        return taken

    def clear(self) -> None:
        self._start += len(self._text)
        self._text, self._tokens = "", []
