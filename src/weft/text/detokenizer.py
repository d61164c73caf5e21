"""StreamDetokenizer: token ids to text while they are generated. Holds back bytes that are not yet a whole character.

Tokens are turned into bytes (a table look-up, see `Tokenizer.token_bytes`), and the bytes into text by Python's
incremental UTF-8 decoder. So a token costs the same however long the output is, at most three bytes are held back, and
emitted text is never revised. The `DecodeStream` of the library decodes its open window again for every token, holds
back undecodable tokens without a limit, and raises for ever after invalid byte-fallback tokens.
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import islice

from weft.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """Emits the text of a growing token sequence, whole characters only.

    All pushes and the flush together equal `tokenizer.decode(all ids)`, however the ids were split. One exception: in a
    run of byte-fallback tokens (<0xE2> ...) that is not valid UTF-8, `decode` writes U+FFFD for every byte of the run.
    This class has already emitted the valid characters of the run, and writes U+FFFD only for the other bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()):
        """`context` is the prompt before the tokens. After a prompt with text, a leading space of the reply is kept."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._first = True
        self._between = False  # whether text was pushed and nothing is held back
        self._utf8 = _utf8_decoder(errors=_ONE_PER_BYTE if tokenizer.byte_fallback else "replace")
        # A character has at most four bytes, so at most four tokens matter.
        visible = list(islice((t for t in reversed(context) if tokenizer.token_bytes(t) and t not in self._hidden), 4))
        self.push(reversed(visible))

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that has become final, often ""."""
        data = []
        for token_id in token_ids:
            if token_id not in self._hidden and (spelling := self._tokenizer.token_bytes(token_id)):
                data.append(self._tokenizer.token_bytes(token_id, first=True) if self._first else spelling)
                self._first = False
        text = self._utf8.decode(b"".join(data))
        self._between = not self._first and not self._utf8.getstate()[0]
        return text

    def push_one(self, token_id: int) -> str:
        """The same for one token. Most are whole characters between whole characters: then it is only a look-up."""
        if self._between and token_id not in self._hidden:
            text = self._tokenizer.whole_text(token_id)
            if text is not None:
                return text
        return self.push((token_id,))

    def flush(self) -> str:
        """Ends the text: returns the rest of an unfinished character as U+FFFD."""
        return self._utf8.decode(b"", True)


def _one_per_byte(error: UnicodeError) -> tuple[str, int]:
    # "replace" writes one U+FFFD for a whole cut-off character, as byte-level decoders do. Byte fallback does not.
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


_ONE_PER_BYTE = "weft.one_per_byte"
codecs.register_error(_ONE_PER_BYTE, _one_per_byte)
_utf8_decoder = codecs.getincrementaldecoder("utf-8")
