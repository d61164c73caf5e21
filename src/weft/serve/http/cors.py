"""CORS: which web pages may send requests from a browser, and the headers that tell the browser."""

import re
from collections.abc import Iterable

from weft.serve.errors import ApiError

Header = tuple[bytes, bytes]
# Origins of pages on this machine, on any port. Browsers write origins in lower case. The origin "null" (a file, a
# sandboxed frame) is never allowed: a page of any site can create a frame with that origin.
_LOCAL = re.compile(rb"http://(?:localhost|127\.0\.0\.1)(?::[0-9]{1,5})?")
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))  # they change nothing and compute nothing
EXPOSED = b", ".join(  # weft's response headers that a page may read
    (
        *(b"x-request-id", b"request-id", b"retry-after", b"x-weft-ignored-fields"),
        *(b"x-slo-ttft-ms", b"x-slo-gap-ms", b"x-slo-promise"),
    )
)
PREFLIGHT: list[Header] = [
    (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"*, authorization"),
    (b"access-control-max-age", b"600"),
]


class AllowedOrigins:
    """The allowed origins, in addition to the server's host (see `check_origin`)."""

    def __init__(self, named: Iterable[str] | None) -> None:
        """`named`: allowed origins, "*" for all; None: pages of this machine."""
        self._named = None if named is None else frozenset(origin.encode() for origin in named)

    def allowed(self, origin: bytes | None) -> bytes | None:
        """The value of access-control-allow-origin. None: no such header, so the page cannot read the answer."""
        if origin is None:
            return None
        if self._named is None:
            return origin if _LOCAL.fullmatch(origin) else None
        return b"*" if b"*" in self._named else origin if origin in self._named else None

    def headers(self, allowed_origin: bytes | None) -> list[Header]:
        """CORS headers of every response. `vary` keeps caches from serving one page's answer to another page."""
        found: list[Header] = []
        if self._named is None or self._named:
            found.append((b"vary", b"Origin"))
        if allowed_origin is not None:
            found += [(b"access-control-allow-origin", allowed_origin), (b"access-control-expose-headers", EXPOSED)]
        return found


def check_origin(headers: dict[bytes, bytes]) -> None:
    """Raises 403 if a web page of another origin sends the request.

    Needed because a page of any origin may POST plain text: browsers send a preflight only before JSON or a key. They
    always set the Origin header on a POST. Other clients set none.
    """
    origin = headers.get(b"origin")
    if origin is None:
        return
    scheme, _, host = origin.lower().partition(b"://")
    if scheme in (b"http", b"https") and host == headers.get(b"host", b"").lower():
        return
    shown = origin[:100].decode("latin-1")
    message = f"the web page's origin {shown!r} is not one that may ask here: start the server with --allowed-origins"
    raise ApiError(403, message, code="origin_not_allowed")
