"""Encodes messages between RemoteExecutor and `serve_executor`: MessagePack, with arrays as type, shape and memory."""

from typing import Any

import msgspec
import numpy as np

_NUMBER_KINDS = ("b", "i", "u", "f")  # kinds of numbers; anything else would be code or references


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_to_plain)


def decode(data: bytes | bytearray, kind: Any) -> Any:
    """Decodes a message of this type. Raises msgspec.ValidationError on anything else."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _from_plain(kind: Any, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise NotImplementedError(f"{kind} cannot be received from another process")
    name, shape, data = value
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBER_KINDS:
        raise ValueError(f"an array of {name} is not an array of numbers")
    return np.frombuffer(data, dtype).reshape(shape).copy()  # a copy, so that it can be written to
