"""The recording over HTTP, and the stalls of the event loop that it contains."""

import asyncio
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from weft.observe.frames import LagFrame, encode_frame
from weft.serve.engines.messages import clock
from weft.serve.errors import ApiError
from weft.serve.server_state import ServerState

LAG_POLL_S = 0.05  # while requests run
IDLE_POLL_S = 0.5
LEAST_LAG_S = 0.005  # a shorter stall is not recorded
NEXT_HEADER = b"x-weft-next"  # what to give as `since` next time
MORE_HEADER = b"x-weft-more"  # 1: the answer was cut, and more frames are there already


class RecordingEndpoint:
    """Answers with the frames that the server still has in memory."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def frames(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Frames after number `since`, or of the last `seconds`, or all. See `RecordingBuffer.read`."""
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        since, seconds = _number(query, "since"), _number(query, "seconds")
        earliest = None if seconds is None else clock() - seconds
        part = self._state.recording.read(None if since is None else int(since), earliest, scope["tenant"])
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % len(part.data)),
            (b"cache-control", b"no-store"),
            (NEXT_HEADER, b"%d" % part.next),
            (MORE_HEADER, b"%d" % part.has_more),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": part.data})


async def record_lags(state: ServerState) -> None:
    """Notices when the event loop stands still while requests run. Runs until it is cancelled."""
    while True:
        wait = LAG_POLL_S if state.active else IDLE_POLL_S
        due = clock() + wait
        await asyncio.sleep(wait)
        now = clock()
        if now - due > LEAST_LAG_S:
            state.recording.add(encode_frame(LagFrame(now, now - due)), "lag", now)


def _number(query: dict[str, str], name: str) -> float | None:
    if (text := query.get(name)) is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 2**53:  # also if it is nan
        raise ApiError(400, f"{name}={text[:40]!r} must be a number, 0 or more", param=name)
    return found
