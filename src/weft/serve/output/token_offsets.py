"""Maps tokens to positions in the text. Used only for requests with log probabilities."""

import codecs
from collections.abc import Sequence

from weft.engine.executor import TokenLogprobs
from weft.text.detokenizer import StreamDetokenizer
from weft.text.tokenizer import Tokenizer


class TokenOffsets:
    """Computes the character offset at which each token of a growing text starts.

    Tokens that form one character together all start where it starts. A hidden token starts where the next one does.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens, context)
        self.length = 0  # characters of the text so far, without an incomplete last one

    def push(self, token: int) -> tuple[int, str]:
        """The offset at which the token starts, and the text that the token made final."""
        before, text = self.length, self._detokenizer.push_one(token)
        self.length += len(text)
        spelling = self._tokenizer.token_bytes(token)
        if 0x80 <= spelling[:1].ljust(1)[0] < 0xC0:
            return before, text  # starts with a UTF-8 continuation byte: continues a character
        own = self._tokenizer.whole_text(token)
        if own is None:  # its last character is incomplete
            own = codecs.utf_8_decode(spelling, "replace", False)[0]
        # The new text may start with the rest of an earlier character that this token does not continue.
        return max(before, self.length - len(own)), text

    def end(self) -> str:
        """The text of an incomplete last character, after the last token."""
        text = self._detokenizer.flush()
        self.length += len(text)
        return text


class WithheldLogprobs:
    """Log probabilities of tokens in withheld text: a possible stop string or tag.

    Log probabilities of tags, and of the token that ends the text, are never returned.
    """

    def __init__(self, in_order: bool) -> None:
        """`in_order`: the whole text is shown. Otherwise parts are hidden, or shown as reasoning or tool calls."""
        self._in_order = in_order
        self._text = ""
        self._start = 0  # where `_text` starts in the whole text
        self._tokens: list[tuple[int, int, TokenLogprobs]] = []  # start, end, log probabilities

    def add(self, start: int, text: str, found: TokenLogprobs) -> None:
        """Adds a token that starts at `start`. `text` is the text that it made final."""
        self._text += text
        end = self._start + len(self._text)
        self._tokens.append((start, max(end, start + 1), found))

    def add_text(self, text: str) -> None:
        """Adds text that belongs to no visible token."""
        self._text += text

    def release(self, shown: str) -> list[TokenLogprobs]:
        """The log probabilities of the tokens in `shown`. Drops all tokens before it."""
        # Searched from the right: hidden text (a tag) comes before `shown`. What follows may be the start of a tag.
        index = 0 if self._in_order else self._text.rfind(shown)
        if index < 0:  # a parser has changed the text
            index, shown = 0, self._text
        start = self._start + index
        end = start + len(shown)
        taken = [found for first, last, found in self._tokens if first < end and last > start]
        self._tokens = [token for token in self._tokens if token[0] >= end]
        self._text = self._text[index + len(shown) :]
        self._start = end
        return taken

    def clear(self) -> None:
        self._start += len(self._text)
        self._text, self._tokens = "", []
