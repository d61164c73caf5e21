"""Downloads the frames of a running weft server, and the metrics page of any server."""

import io
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException

from weft.diagnose.metrics_page import MetricsPage
from weft.errors import EngineError
from weft.observe.frames import HEADER, RecordingError, read_frames
from weft.observe.recording import Recording

TIMEOUT_S = 30.0
MOST_PAGE_BYTES = 64 << 20  # of metrics; more is no metrics page
MOST_FRAMES_BYTES = 256 << 20  # of frames; a server holds far less
NEXT_HEADER = "x-weft-next"  # what to give as `since` next time
MORE_HEADER = "x-weft-more"  # 1: the answer was cut


def download_frames(url: str, key: str | None, seconds: float | None = None) -> Recording:
    """What the server holds in memory, or only the last `seconds` of it. An answer has at most a few megabytes."""
    source = f"{url}/observe/frames"
    query = "" if seconds is None else f"?seconds={seconds:g}"
    body = b""
    try:
        while len(body) <= MOST_FRAMES_BYTES:
            part, headers = _get(source + query, key, MOST_FRAMES_BYTES)
            body += part
            if headers.get(MORE_HEADER) != "1":
                break
            query = f"?since={headers.get(NEXT_HEADER)}"
    except EngineError as error:
        if "status 404" not in str(error):
            raise
        raise EngineError(
            f"{url} has no /observe/frames: for a server of another engine, write --engine vllm or sglang; a weft "
            "server may be older, or run without its recorder"
        ) from None
    try:
        return Recording.of(read_frames(io.BytesIO(HEADER + body), source))
    except RecordingError:
        raise EngineError(f"{source} does not answer with frames: is it a weft server of this version?") from None


def read_metrics(source: str, key: str | None) -> MetricsPage:
    body, _ = _get(source, key, MOST_PAGE_BYTES)
    return MetricsPage.parse(body.decode(errors="replace"), source)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the API key to another server."""

    def redirect_request(self, *arguments: object) -> None:
        return None


def _get(source: str, key: str | None, most: int) -> tuple[bytes, Message]:
    """The body and the headers of an answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)  # no proxies, as in weft bench
    try:
        with direct.open(urllib.request.Request(source, headers=headers), timeout=TIMEOUT_S) as response:
            body: bytes = response.read(most + 1)
            found: Message = response.headers
    except urllib.error.HTTPError as error:
        hint = ": give --api-key" if error.code in (401, 403) else ""
        raise EngineError(f"{source} answers with status {error.code}{hint}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{source} cannot be read: {reason}") from None
    if len(body) > most:
        raise EngineError(f"{source} answers with more than {most} bytes: it is not what was asked for")
    return body, found
