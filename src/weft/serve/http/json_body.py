"""Decodes JSON bodies without holding the GIL for long.

The decoder holds the GIL for the whole call: 0.2 s for a prompt of a million token ids, while all streams wait. So a
large body is first split into its fields, without decoding them. This is fast because no objects are built. Unknown
fields stay undecoded. Lists of token ids are decoded in pieces, and other threads can run between two pieces. All
other fields are mostly text and are decoded in one call. Their number of values is limited, because templates,
validators and encoders process all values in one call too.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec

from weft.files import MOST_DEPTH, is_too_deep
from weft.serve.errors import ApiError

T = TypeVar("T")
LARGE_BODY = 1 << 17  # bytes; a body up to this size is decoded in one call: a few milliseconds at most
INLINE_BODY = 1 << 15  # bytes; decoding up to this size takes less time than handing it to a thread
IDS_PIECE = 1 << 14  # bytes of a list of token ids that are decoded in one call
MOST_VALUES = 100_000  # in a large body, without token ids: a chat of 30,000 messages has so many
MOST_LISTS = 2048  # lists of token ids in one field
_SPACE = b" \t\r\n"
_OF_NUMBERS = b"[0123456789-," + _SPACE + b"]"  # all characters of a list of integers


def parse(data: bytes, kind: type[T]) -> T:
    """A body of the given Struct type. Numbers may be written as strings, as some clients do."""
    return parse_all(data, kind)[0]


def parse_all(data: bytes, kind: type[T], names: frozenset[str] = frozenset()) -> tuple[T, dict[str, bytes]]:
    """A body, and the fields that `kind` does not define, as JSON by name.

    For a large body, the latter are only the fields in `names`, and the first one that is not.
    """
    struct: Any = kind  # mypy does not know that it has fields and is hashable
    may_be_deep = data.count(b"[") + data.count(b"{") > MOST_DEPTH
    if len(data) <= LARGE_BODY:
        whole, others = _decode_small(data, kind)
        if may_be_deep:
            _check_depth({name: getattr(whole, name) for name in struct.__struct_fields__})
        return whole, others
    raws, others = _split_large(data, struct, names)
    fields = {name: ids for name, raw in raws.items() if (ids := _token_ids(raw)) is not None}
    texts = {name: raw for name, raw in raws.items() if name not in fields}
    if have_too_many_values(texts.values()):
        raise ApiError(400, f"the body has more than {MOST_VALUES} values (objects, lists, numbers, texts) in it")
    decoded = {name: msgspec.json.decode(raw) for name, raw in texts.items()}
    if may_be_deep:
        _check_depth(decoded)
    fields.update(decoded)
    return msgspec.convert(fields, kind, strict=False), others


def _decode_small(data: bytes, kind: Any) -> tuple[Any, dict[str, bytes]]:
    """Decodes a small body, and its unknown fields. Most bodies have none and are decoded only once."""
    try:
        return msgspec.json.decode(data, type=_strict(kind), strict=False), {}
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
    whole = msgspec.json.decode(data, type=kind, strict=False)
    every = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return whole, {name: bytes(raw) for name, raw in every.items() if name not in kind.__struct_fields__}


def _split_large(data: bytes, kind: Any, names: frozenset[str]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The fields of a large body that `kind` defines, and the others. None of them is decoded."""
    own = kind.__struct_fields__
    unread = _unread(kind.__name__, (*own, *(names - {*own})))
    others = {}
    try:
        found: Any = msgspec.json.decode(data, type=_strict(unread))
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
        others[str(error)[len(_UNKNOWN) :].removesuffix("`")] = b"null"
        found = msgspec.json.decode(data, type=unread)
    raws = {name: bytes(raw) for name in found.__struct_fields__ if (raw := getattr(found, name)) is not None}
    others.update({name: raw for name, raw in raws.items() if name not in own})
    return {name: raw for name, raw in raws.items() if name in own}, others


_UNKNOWN = "Object contains unknown field `"


@cache
def _strict(kind: Any) -> Any:
    """The same struct, but unknown fields are an error."""
    return msgspec.defstruct(kind.__name__, [], bases=(kind,), forbid_unknown_fields=True, kw_only=True)


def _check_depth(fields: dict[str, Any]) -> None:
    """Raises if a field is nested too deep. Encoding, copying and rendering then never hit Python's recursion limit."""
    for name, value in fields.items():
        if is_too_deep(value):
            raise ApiError(400, f"{name} is nested more than {MOST_DEPTH} levels deep: make it flatter", param=name)


@cache
def _unread(kind: str, names: tuple[str, ...]) -> Any:
    """A struct that finds these fields without decoding them, and skips all others."""
    return msgspec.defstruct(f"Unread{kind}", [(name, msgspec.Raw, None) for name in names])


def have_too_many_values(texts: Iterable[bytes]) -> bool:
    """Whether JSON texts together have more than MOST_VALUES values. Invalid JSON is harmless."""
    texts = list(texts)
    if sum(_values(text, 0, len(text)) for text in texts) <= MOST_VALUES:  # upper bound: counts commas in strings
        return False
    total = 0
    for text in texts:
        for start, end in _outside_strings(text):
            total += _values(text, start, end)
            if total > MOST_VALUES:
                return True
    return False


def _values(text: bytes, start: int, end: int) -> int:
    """Approximate number of values: each is the first of a list or an object, or follows a comma."""
    return sum(text.count(mark, start, end) for mark in (b",", b"[", b"{"))


def _outside_strings(text: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while (start := text.find(b'"', at)) >= 0:
        yield at, start
        at = _string_end(text, start + 1)
    yield at, len(text)


def _string_end(text: bytes, at: int) -> int:
    """The index after the closing quote of a string. `at` is the index after the opening quote."""
    end = text.find(b'"', at)
    if end >= 0 and text[end - 1 : end] != b"\\":  # no escaped quote: the common case
        return end + 1
    while (inside := _INSIDE.match(text, at, at + IDS_PIECE)) is not None and inside.end() > at:
        at = inside.end()
    return min(at + 1, len(text))


_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # the inside of a string, with escapes


def _token_ids(raw: bytes) -> list[Any] | None:
    """A list of integers, or a list of such lists. None if the (valid) JSON is something else."""
    if raw[:IDS_PIECE].translate(None, _OF_NUMBERS) or raw.translate(None, _OF_NUMBERS):  # most fail early
        return None
    lists = raw.count(b"[")
    if lists == 1:
        return _numbers(raw)
    if not 1 < lists <= MOST_LISTS:
        return None
    *inner, rest = [part.strip(b"," + _SPACE) for part in raw.strip(_SPACE)[1:-1].split(b"]")]
    if rest or any(not part.startswith(b"[") or part.count(b"[") > 1 for part in inner):
        return None
    return [_numbers(part + b"]") for part in inner]


def _numbers(raw: bytes) -> list[int]:
    return [number for piece in _cut(raw.strip(_SPACE)[1:-1]) for number in msgspec.json.decode(b"[%b]" % piece)]


def _cut(numbers: bytes) -> Iterator[bytes]:
    """Splits a list without its brackets into pieces, at commas."""
    start = 0
    while start < len(numbers):
        end = numbers.find(b",", start + IDS_PIECE)
        end = len(numbers) if end < 0 else end
        yield numbers[start:end]
        start = end + 1
