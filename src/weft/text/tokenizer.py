"""Text to token ids and back. Owns the `tokenizers` backend of a model directory and the bytes of every token.

A directory without tokenizer.json is no error: such a model is used with token ids only.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from weft.errors import ModelError, RequestError
from weft.files import read_json


class Tokenizer:
    """Encodes and decodes whole texts. `StreamDetokenizer` decodes streams. Safe to use from several threads."""

    def __init__(self, backend: Backend, special_tokens: dict[str, str] | None = None, add_bos_token: bool = False):
        """`special_tokens` are texts by name: {"eos_token": "</s>"}. `add_bos_token` adds what tokenizer.json omits."""
        backend.no_truncation()  # a saved training setting would cut prompts silently
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        # A named token of the vocabulary that is not marked special would appear in text despite skip_special_tokens.
        backend.add_special_tokens([t for t in self.special_tokens.values() if backend.token_to_id(t) is not None])
        self._backend = backend
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
        self._byte_level, self.byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._spelled: dict[tuple[int, bool], bytes] = {}  # at most two entries per token of the vocabulary
        self._whole: dict[int, str | None] = {}
        self._prefix: list[int] = []
        if add_bos_token and self.bos_token_id is not None and self.encode("")[:1] != [self.bos_token_id]:
            self._prefix = [self.bos_token_id]

    @classmethod
    def load(cls, path: Path) -> "Tokenizer | None":
        """The tokenizer of a Hugging Face directory, or None where the directory has no tokenizer.json."""
        file = path / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"{file} is not a usable tokenizer: {one_line(error)}") from error
        config = read_json(path / "tokenizer_config.json", optional=True)
        return cls(backend, read_special_tokens(path), add_bos_token=config.get("add_bos_token") is True)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the tokenizer, added ones included. The model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Upper bound of the characters of one token."""
        return max((len(token) for token in self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        # The batch call, even for one text: only it releases the GIL, so a long prompt does not stall other streams.
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:
            raise RequestError("the text to encode is not a string of valid Unicode (a lone surrogate?)") from None
        prefix = self._prefix if add_special_tokens else []
        return [prefix + encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids unknown to the tokenizer are skipped: a model may have spare rows."""
        try:
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except (OverflowError, TypeError):
            raise RequestError("token ids must be non-negative 32-bit integers") from None

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> str:
        """One token for display, as in a list of logprobs. Bytes that are no character by themselves become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_piece(self, token_id: int) -> str:
        """A token as the vocabulary has it, such as "\u0120the"; "" where there is none."""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int, first: bool = False) -> bytes:
        """The UTF-8 bytes that a token adds to the text, perhaps part of a character. `first`: no token precedes it.

        A sentencepiece decoder drops the space of the first token, so the two differ.
        """
        spelling = self._spelled.get((token_id, first))
        if spelling is None:
            spelling = self._spelled[token_id, first] = self._spell(token_id, first)
        return spelling

    def whole_text(self, token_id: int) -> str | None:
        """The text that a token adds after other text; None if it is not made of whole characters."""
        try:
            return self._whole[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._whole[token_id] = text
            return text

    def _spell(self, token_id: int, first: bool) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.byte_fallback and (byte := _NON_ASCII_BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if self._byte_level:
            # A piece with a character outside the alphabet is an added token, spelled as it is.
            return bytes(_BYTE_OF[c] for c in piece) if all(c in _BYTE_OF for c in piece) else piece.encode()
        # For other decoders, decode the token twice: the second occurrence adds what the token adds in the middle of a
        # text. (This is wrong for decoders that look at the next token, BPEDecoder and CTC; no supported model has
        # one.)
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return (once if first else twice[len(once) :]).encode()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def read_special_tokens(path: Path) -> dict[str, str]:
    """Names and texts of a directory's special tokens. Both files are optional, and tokenizer_config.json wins."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(path / name, optional=True).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves, and the other bytes as U+0100, U+0101, ... in order."""
    printable = {chr(byte) for byte in range(256)} & set(pre_tokenizers.ByteLevel.alphabet())
    others = [byte for byte in range(256) if chr(byte) not in printable]
    return {c: ord(c) for c in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# Byte fallback spells a byte as <0xE2>. ASCII bytes are whole characters and need no special treatment.
_NON_ASCII_BYTE = re.compile(r"<0x([89A-Fa-f][0-9A-Fa-f])>")
