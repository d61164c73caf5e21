"""PageFiles: the static files of the page, read once, and the headers that go with them."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.types import Send

FOLDER = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
INDEX = "index.html"

# No inline script or style, nothing from elsewhere, no frames, and no text that becomes markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    (b"cache-control", b"no-cache"),  # browsers ask each time whether the file has changed
]


class PageFile(NamedTuple):
    body: bytes
    content_type: bytes
    tag: bytes  # the entity tag: changes with the body


class PageFiles:
    """All files of the page, by name."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in TYPES}

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all files on the server."""
        return frozenset(("/", *(f"/page/{name}" for name in self._files)))

    def find(self, name: str) -> PageFile | None:
        return self._files.get(name)


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    content_type = f"{TYPES[path.suffix]}; charset=utf-8"
    return PageFile(body, content_type.encode(), b'"%b"' % hashlib.sha256(body).hexdigest()[:16].encode())


async def send_file(file: PageFile, known_tags: bytes, send: Send) -> None:
    """Sends a file, or 304 if the browser has it already. `known_tags` is the header if-none-match."""
    is_known = file.tag in [tag.strip().removeprefix(b"W/") for tag in known_tags.split(b",")]
    body = b"" if is_known else file.body
    headers = [*HEADERS, (b"etag", file.tag)]
    if not is_known:
        headers += [(b"content-type", file.content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 304 if is_known else 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
