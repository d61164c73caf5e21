"""Reading JSON bodies without holding the interpreter for long.

A decoder that works in one call keeps every other thread out until it is done: a fifth of a second for a prompt of a
million token ids, and all streams would wait. So a large body is taken apart into its fields first, which is fast as
nothing is built, and large lists are then decoded in pieces; between two pieces others get their turn.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
LARGE = 1 << 17  # bytes of a body that are decoded in one call: a few milliseconds at most
PIECE = 1 << 14  # bytes of a list that are decoded in one call
_OF_NUMBERS = b"[0123456789-, \t\r\n]"  # all that a list of whole numbers consists of


def parse(data: bytes, kind: type[T]) -> T:
    """A body of the given kind; a number may also be written as text, as some clients do."""
    if len(data) <= LARGE:
        return msgspec.json.decode(data, type=kind, strict=False)
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return msgspec.convert({name: _value(bytes(raw)) for name, raw in fields.items()}, kind, strict=False)


def _value(raw: bytes) -> Any:
    if len(raw) <= PIECE or not raw.lstrip().startswith(b"["):
        return msgspec.json.decode(raw)
    if not raw.translate(None, _OF_NUMBERS) and raw.count(b"[") == 1:
        return [number for piece in _cut(raw.strip()[1:-1]) for number in msgspec.json.decode(b"[%b]" % piece)]
    return [_value(bytes(item)) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]


def _cut(numbers: bytes) -> Iterator[bytes]:
    """Pieces of a list without its brackets, cut at commas."""
    start = 0
    while start < len(numbers):
        end = numbers.find(b",", start + PIECE)
        end = len(numbers) if end < 0 else end
        yield numbers[start:end]
        start = end + 1
