"""Reading JSON bodies without holding the interpreter for long.

A decoder that works in one call keeps every other thread out until it is done: a fifth of a second for a prompt of a
million token ids, and all streams would wait. So a large body is taken apart into its fields first, which is fast as
nothing is built, and fields that nobody knows are left at that. Lists of token ids are decoded in pieces; between two
pieces others get their turn. Everything else is text for the most part and is decoded at once, as long as it consists
of few values: also templates, validators and encoders deal with all of them in one call.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec

from weft.files import MOST_DEPTH, is_too_deep
from weft.serve.errors import ApiError

T = TypeVar("T")
LARGE = 1 << 17  # bytes of a body that are decoded in one call: a few milliseconds at most
QUICK = 1 << 15  # bytes that are decoded in less time than another thread needs to begin
PIECE = 1 << 14  # bytes of a list that are decoded in one call
MOST_VALUES = 100_000  # in a large body, beside token ids: a chat of 30,000 messages has so many
MOST_LISTS = 2048  # of token ids in one field
_SPACE = b" \t\r\n"
_OF_NUMBERS = b"[0123456789-," + _SPACE + b"]"  # all that a list of whole numbers consists of


def parse(data: bytes, kind: type[T]) -> T:
    """A body of the given kind, a Struct; a number may also be written as text, as some clients do."""
    return parse_all(data, kind)[0]


def parse_all(data: bytes, kind: type[T], names: frozenset[str] = frozenset()) -> tuple[T, dict[str, bytes]]:
    """A body, and what it has beside the fields of its kind: JSON by name.

    Of a large body these are the fields in `names`, and the first of all others.
    """
    struct: Any = kind  # mypy knows neither that it has fields nor that it is hashable
    may_be_deep = data.count(b"[") + data.count(b"{") > MOST_DEPTH
    if len(data) <= LARGE:
        whole, others = _at_once(data, kind)
        if may_be_deep:
            _check_depth({name: getattr(whole, name) for name in struct.__struct_fields__})
        return whole, others
    raws, others = _apart(data, struct, names)
    fields = {name: ids for name, raw in raws.items() if (ids := _token_ids(raw)) is not None}
    texts = {name: raw for name, raw in raws.items() if name not in fields}
    if hold_too_many(texts.values()):
        raise ApiError(400, f"the body has more than {MOST_VALUES} values (objects, lists, numbers, texts) in it")
    decoded = {name: msgspec.json.decode(raw) for name, raw in texts.items()}
    if may_be_deep:
        _check_depth(decoded)
    fields.update(decoded)
    return msgspec.convert(fields, kind, strict=False), others


def _at_once(data: bytes, kind: Any) -> tuple[Any, dict[str, bytes]]:
    """Most bodies have no unknown field, and are decoded once."""
    try:
        return msgspec.json.decode(data, type=_strict(kind), strict=False), {}
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
    whole = msgspec.json.decode(data, type=kind, strict=False)
    every = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return whole, {name: bytes(raw) for name, raw in every.items() if name not in kind.__struct_fields__}


def _apart(data: bytes, kind: Any, names: frozenset[str]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The fields of a large body, and others; none is decoded."""
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
    """The same struct, of which a body may have no other fields."""
    return msgspec.defstruct(kind.__name__, [], bases=(kind,), forbid_unknown_fields=True, kw_only=True)


def _check_depth(fields: dict[str, Any]) -> None:
    """What is read can then be written, copied and shown without a thought of how deep Python may go."""
    for name, value in fields.items():
        if is_too_deep(value):
            raise ApiError(400, f"{name} is nested more than {MOST_DEPTH} levels deep: make it flatter", param=name)


@cache
def _unread(kind: str, names: tuple[str, ...]) -> Any:
    """These fields, found and not decoded. All others are passed over without a trace."""
    return msgspec.defstruct(f"Unread{kind}", [(name, msgspec.Raw, None) for name in names])


def hold_too_many(texts: Iterable[bytes]) -> bool:
    """Whether JSON texts hold more than MOST_VALUES values together. Ones that are no JSON do no harm."""
    texts = list(texts)
    if sum(_values(text, 0, len(text)) for text in texts) <= MOST_VALUES:  # with the commas of what people write
        return False
    total = 0
    for text in texts:
        for start, end in _outside_strings(text):
            total += _values(text, start, end)
            if total > MOST_VALUES:
                return True
    return False


def _values(text: bytes, start: int, end: int) -> int:
    """About how many begin here: each is the first one of a list or an object, or comes behind a comma."""
    return sum(text.count(mark, start, end) for mark in (b",", b"[", b"{"))


def _outside_strings(text: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while (start := text.find(b'"', at)) >= 0:
        yield at, start
        at = _string_end(text, start + 1)
    yield at, len(text)


def _string_end(text: bytes, at: int) -> int:
    """Behind the quote that ends a string whose inside begins here."""
    end = text.find(b'"', at)
    if end >= 0 and text[end - 1 : end] != b"\\":  # most are as simple as that
        return end + 1
    while (inside := _INSIDE.match(text, at, at + PIECE)) is not None and inside.end() > at:
        at = inside.end()
    return min(at + 1, len(text))


_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)  # of a string, with its escapes


def _token_ids(raw: bytes) -> list[Any] | None:
    """A list of whole numbers, or of such lists; None where valid JSON is something else."""
    if raw[:PIECE].translate(None, _OF_NUMBERS) or raw.translate(None, _OF_NUMBERS):  # most differ early
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
    """Pieces of a list without its brackets, cut at commas."""
    start = 0
    while start < len(numbers):
        end = numbers.find(b",", start + PIECE)
        end = len(numbers) if end < 0 else end
        yield numbers[start:end]
        start = end + 1
