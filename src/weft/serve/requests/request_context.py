"""RequestContext: what is known about a request besides its body."""

import secrets
from typing import NamedTuple

from weft.serve.protocols.openai_bodies import LatencyTargets


class RequestContext(NamedTuple):
    """The sender of a request, its arrival, and the latency targets of its headers."""

    tenant: str  # derived from the API key
    salt: str  # keeps its cached prefixes apart from other tenants'
    targets: LatencyTargets
    arrival: float  # seconds on `clock`
    request_id: str
    size: int  # bytes of the body: an upper bound of the work on it, which goes to another thread if large


def new_request_id() -> str:
    return secrets.token_hex(12)
