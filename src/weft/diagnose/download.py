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
MOST_FRAMES_BYTES = 256 << 20  # of frames; a server holds far less
FULL_ANSWER_BYTES = 1 << 20  # a shorter answer is the last one: the server cuts them at 4 MiB
NEXT_HEADER = "x-weft-next"  # what to give as `since` next time


def download_frames(url: str, key: str | None, seconds: float | None = None) -> Recording:
    """What the server holds in memory, or only the last `seconds` of it. An answer has at most a few megabytes."""
    source = f"{url}/observe/frames"
    query = "" if seconds is None else f"?seconds={seconds:g}"
    body = b""
    try:
        while len(body) <= MOST_FRAMES_BYTES:
            part, following = _get(source + query, key, MOST_FRAMES_BYTES)
            body += part
            if len(part) < FULL_ANSWER_BYTES or not following:  # that was all; a busy server has new frames already
                break
            query = f"?since={following}"
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


def _get(source: str, key: str | None, most: int) -> tuple[bytes, str]:
    """The body, and the header NEXT_HEADER."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxies, as in weft bench
    try:
        with direct.open(urllib.request.Request(source, headers=headers), timeout=TIMEOUT_S) as response:
            body: bytes = response.read(most + 1)
            following: str = response.headers.get(NEXT_HEADER, "")
    except urllib.error.HTTPError as error:
        hint = ": give --api-key" if error.code in (401, 403) else ""
        raise EngineError(f"{source} answers with status {error.code}{hint}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"{source} cannot be read: {reason}") from None
    if len(body) > most:
        raise EngineError(f"{source} answers with more than {most} bytes: it is not what was asked for")
    return body, following
