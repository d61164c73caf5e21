"""The latency targets that a client sends in headers."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from weft.serve.errors import ApiError


class LatencyTargets(NamedTuple):
    """Latency targets from the request headers, in milliseconds."""

    ttft_ms: float | None
    gap_ms: float | None


TTFT_NAMES = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")  # the first header that is given counts
GAP_NAMES = (b"x-slo-gap-ms", b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")


def latency_targets(headers: Mapping[bytes, bytes]) -> LatencyTargets:
    """Latency targets from the x-slo headers, or from llm-d's names for them."""
    ttft, gap = (
        [value for name in names if (value := _milliseconds(headers, name)) is not None]
        for names in (TTFT_NAMES, GAP_NAMES)
    )
    return LatencyTargets(ttft[0] if ttft else None, gap[0] if gap else None)


_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _milliseconds(headers: Mapping[bytes, bytes], name: bytes) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    value = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan  # float() accepts more: 1_0, infinity
    if not 0 < value < math.inf:
        shown = text[:40].decode("latin-1")
        raise ApiError(400, f"{name.decode()}: {shown!r} is not a number of milliseconds above 0", param=name.decode())
    return value
