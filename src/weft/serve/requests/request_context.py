"""RequestContext: what is known about a request besides its body."""

from typing import NamedTuple

from weft.serve.protocols.latency_headers import LatencyTargets


class RequestContext(NamedTuple):
    """The sender of a request, its arrival, and the latency targets of its headers."""

    tenant: str  # derived from the API key
    salt: str  # keeps its cached prefixes apart from other tenants'
    targets: LatencyTargets
    arrival: float  # seconds on `clock`
    request_id: str  # `x-request-id`: the client's, or else the random id
    random_id: str  # 96 random bits; equal to request_id if the client sent none
    size: int  # bytes of the body: an upper bound of the work on it, which goes to another thread if large

    @property
    def response_id(self) -> str:
        """The id of the response, without the prefix of its API. Unique even if a client sends the same id twice."""
        return self.random_id if self.request_id == self.random_id else f"{self.request_id}-{self.random_id}"
