"""Origins: which web pages may ask from a browser, and what browsers are told about that (CORS)."""

import re
from collections.abc import Iterable

from weft.serve.errors import ApiError

Header = tuple[bytes, bytes]
# Pages that this machine serves, on any port. Browsers write origins in lower case. "null" (a file, a sandboxed frame)
# is never among them: any page of any site can make a frame of that origin.
_LOCAL = re.compile(rb"http://(?:localhost|127\.0\.0\.1)(?::[0-9]{1,5})?")
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))  # change and compute nothing
EXPOSED = b", ".join(  # headers of ours that a page may read
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


class Origins:
    """The pages that may ask, beside those of the server's own host."""

    def __init__(self, named: Iterable[str] | None) -> None:
        """`named`: origins, "*" for all; None: pages of this machine."""
        self._named = None if named is None else frozenset(origin.encode() for origin in named)

    def open_to(self, origin: bytes | None) -> bytes | None:
        """What a browser is told in access-control-allow-origin; None: nothing, and the page learns nothing."""
        if origin is None:
            return None
        if self._named is None:
            return origin if _LOCAL.fullmatch(origin) else None
        return b"*" if b"*" in self._named else origin if origin in self._named else None

    def headers(self, open_to: bytes | None) -> list[Header]:
        """What every answer says. With `vary`, caches do not give one page's answer to another."""
        found: list[Header] = []
        if self._named is None or self._named:
            found.append((b"vary", b"Origin"))
        if open_to is not None:
            found += [(b"access-control-allow-origin", open_to), (b"access-control-expose-headers", EXPOSED)]
        return found


def check_origin(headers: dict[bytes, bytes]) -> None:
    """A page of any origin may send a POST of plain text: browsers ask for leave only before they send JSON or a key.

    They always name the origin with a POST. Other clients name none.
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
