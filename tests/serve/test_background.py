"""Background responses without a server: the log of their events, and how they end."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import RequestError
from weft.serve.endpoints.disconnect_watcher import CLIENT_DISCONNECTED, ClientDisconnected
from weft.serve.endpoints.responses_api.background_response import BackgroundResponse
from weft.serve.endpoints.responses_api.event_log import EventLog, follow
from weft.serve.endpoints.responses_api.response_store import ResponseStore, StoredResponse
from weft.serve.endpoints.responses_api.responses_endpoints import ResponsesEndpoints
from weft.serve.engines.request_output_collector import RequestOutputCollector
from weft.serve.errors import ApiError
from weft.serve.log_limits import LogRateLimit
from weft.serve.protocols.responses_bodies import ResponsesBody
from weft.serve.protocols.responses_formatter import ResponsesFormatter


def event(number: int, size: int = 0) -> bytes:
    return b"event: x\ndata: %d%b\n\n" % (number, b"y" * size)


@given(st.lists(st.lists(st.integers(0, 60), max_size=4), max_size=30), st.integers(0, 300))
def test_a_log_keeps_the_last_events_within_its_bound(batches: list[list[int]], most: int) -> None:
    log, every = EventLog(most), []
    for batch in batches:
        events = [event(len(every) + place, size) for place, size in enumerate(batch)]
        log.append(b"".join(events))
        every += events
        kept = log.events
        assert list(kept) == every[log.first :]
        assert sum(map(len, kept)) <= most or len(kept) == 1
        assert log.first == 0 or sum(map(len, every[log.first - 1 :])) > most, "no more is dropped than must be"
        for number in range(log.first, len(every) + 2):
            assert log.since(number) == every[number:]


def followed(log: EventLog, number: int, then: Callable[[], object], during: bool = False) -> bytes:
    """What a client gets of a log to which `then` happens: when it waits for more, or `during` its first read."""

    async def scenario() -> bytes:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)
            if during and len(sent) == 2:  # behind the head
                then()

        reading = asyncio.create_task(follow(log, number, [], receive, send))
        while not during and not reading.done() and log._changed is None:
            await asyncio.sleep(0)
        if not during:
            then()
        await asyncio.wait_for(reading, 5)
        assert not sent[-1].get("more_body", False)
        return b"".join(message.get("body", b"") for message in sent)

    return asyncio.run(scenario())


def test_a_follower_gets_what_was_and_what_comes() -> None:
    log = EventLog()
    log.append(event(0) + event(1))
    assert followed(log, 1, lambda: (log.append(event(2)), log.end())) == event(1) + event(2)
    assert followed(log, 5, lambda: None) == b"", "it has ended before that"


def test_a_follower_that_is_too_slow_is_let_go() -> None:
    log = EventLog(100)
    log.append(event(0))

    def flood() -> None:
        for number in range(1, 50):
            log.append(event(number))

    assert followed(log, 0, flood, during=True) == event(0)
    with pytest.raises(ApiError, match="not kept any more"):
        followed(log, 0, lambda: None)


Result = tuple[StoredResponse, list[str]]


def run(work: Callable[..., Awaitable[None]], streams: bool = False, **bounds: int) -> Result:
    """How a response ends that does this work, and what was called on the way."""

    async def scenario() -> Result:
        format = ResponsesFormatter("resp_1", "model", None, ResponsesBody(input="x"))
        format.is_background = format.is_stored = True
        logged: list[str] = []
        stored = ResponsesEndpoints(None, LogRateLimit(logged.append), 10**6, is_on=True)  # type: ignore[arg-type]
        stored.store = ResponseStore(lambda: 0.0, **bounds)
        admission, left = ExitStack(), []
        admission.callback(lambda: left.append("left"))
        running = BackgroundResponse("key", format, b'[{"role":"user"}]', streams)
        stored.start(running, work, admission)
        await asyncio.wait_for(running.ended.wait(), 5)
        assert left == ["left"], "it does not count among those that run any more"
        assert not stored.running
        found = stored.store.get("key", "resp_1")
        assert found is not None
        return found, logged

    return asyncio.run(scenario())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "logs"),
    [
        (ApiError(503, "too late", code="deadline"), "failed", "rate_limit_exceeded", False),
        (ApiError(503, "it died", code="engine_died"), "failed", "server_error", False),
        (RequestError("no room for this"), "failed", "server_error", False),
        (ZeroDivisionError("a secret"), "failed", "server_error", True),
        (ClientDisconnected(), "cancelled", None, False),
    ],
)
def test_how_it_ends(error: Exception, status: str, code: str | None, logs: bool, streams: bool) -> None:
    async def work(watcher: object, send: object) -> None:
        raise error

    found, logged = run(work, streams)
    body = json.loads(found.body)
    assert body["status"] == status
    assert (body["error"] and body["error"]["code"]) == code
    assert bool(logged) == logs
    assert b"a secret" not in found.body
    if streams:
        last = json.loads(found.events[-1].partition(b"data: ")[2])
        assert (last["type"], last["response"]) == ("response.failed", body)
        assert last["sequence_number"] == len(found.events) - 1


def test_one_that_is_too_large_to_be_stored_says_so() -> None:
    async def work(watcher: object, send: Callable[..., Awaitable[None]]) -> None:
        await send({"type": "http.response.body", "body": b"x" * 100_000})

    found, _ = run(work, most_each=20_000)
    body = json.loads(found.body)
    assert body["status"] == "failed"
    assert "20000 may be stored" in body["error"]["message"]


def test_cancelling_before_it_is_submitted() -> None:
    """As while the request is on its way to the engine."""

    async def scenario() -> None:
        running = BackgroundResponse(
            "key", ResponsesFormatter("resp_1", "model", None, ResponsesBody(input="x")), b"[]", False
        )
        running.cancel()
        collector = RequestOutputCollector()
        running.attach(collector)
        (update,) = await asyncio.wait_for(collector.updates(), 5)
        assert update.failure == CLIENT_DISCONNECTED

    asyncio.run(scenario())
