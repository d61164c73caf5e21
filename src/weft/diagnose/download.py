"""Downloads the frames of a running weft server, and the metrics page of any server."""

import io
import urllib.error
import urllib.request
from http.client import HTTPException

from weft.diagnose.metrics_page import MetricsPage
from weft.errors import EngineError
from weft.observe.frames import HEADER, RecordingError, read_frames
from weft.observe.recording import Recording

TIMEOUT_S = 30.0
MOST_PAGE_BYTES = 64 << 20  # of metrics; more is no metrics page
MOST_FRAMES_BYTES = 4 << 30  # of frames; a ring in memory is far smaller


def download_frames(url: str, key: str | None) -> Recording:
    """What the server holds in memory."""
    source = f"{url}/observe/frames"
    try:
        body = _get(source, key, MOST_FRAMES_BYTES)
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
    body = _get(source, key, MOST_PAGE_BYTES)
    return MetricsPage.parse(body.decode(errors="replace"), source)


def _get(source: str, key: str | None, most: int) -> bytes:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxies, as in weft bench
    try:
        with direct.open(urllib.request.Request(source, headers=headers), timeout=TIMEOUT_S) as response:
            body: bytes = response.read(most + 1)
    except urllib.error.HTTPError as error:
        hint = ": give --api-key" if error.code in (401, 403) else ""
        raise EngineError(f"{source} answers with status {error.code}{hint}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{source} cannot be read: {reason}") from None
    if len(body) > most:
        raise EngineError(f"{source} answers with more than {most} bytes: it is not what was asked for")
    return body
