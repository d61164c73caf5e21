"""Client: sends requests to an OpenAI-compatible server, and records when each chunk of an answer arrives."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from weft.bench.http.load_request import LoadRequest
from weft.errors import EngineError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls")  # fields of a chat delta that a reader would see
# Optional fields that help to measure. Not every server accepts them: `discover` takes the first set that is accepted.
OPTIONAL_FIELDS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
    {"ignore_eos": True},
    {},
)
# Errors for a body that is not JSON. ValueError: bytes that are not UTF-8; RecursionError: brackets nested too deep.
NO_JSON = (msgspec.DecodeError, ValueError, RecursionError)
REFUSED = (429, 503)  # HTTP statuses of a server that is too busy for a request
FIRST_REQUEST = LoadRequest(0.0, "Hello", 1, 2)
CONCURRENT_COUNTS = 16  # concurrent requests that count tokens


@dataclass(slots=True)
class Reply:
    """The result of one request. Times are seconds from the start of the run."""

    number: int
    due: float  # when it was to be sent
    prompt_tokens: int  # the requested number, until the server reports its count
    sent: float = math.nan
    times: list[float] = field(default_factory=list)  # of every chunk that has content
    end: float = math.nan  # of the whole answer, or of the failed attempt
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str = ""  # message; "": no error
    status: int = 0  # HTTP status; 0: no response
    server: dict[str, Any] | None = None  # times that a weft server reports
    has_finished: bool = False  # the server gave a finish_reason
    free: float = 0.0  # earliest time at which the concurrency limit allowed sending
    begun: float = math.nan  # when the first choice came, with content or without
    asked_input: int = 0  # requested tokens; 0: not known
    asked_output: int = 0
    is_without_usage: bool = False  # the server reported no output tokens: every chunk counts as one token
    retry_after: float | None = None  # seconds: the server's Retry-After of a refusal
    retries: int = 0  # attempts before this one, all refused
    retry_wait: float = 0.0  # seconds from the due time of the first attempt to the due time of this one

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.times)


class ClientSettings(NamedTuple):
    """Everything that a client in another process needs to send the same requests."""

    base: str
    model: str
    endpoint: str
    key: str | None
    temperature: float
    timeout: float
    always: dict[str, Any]
    extras: dict[str, Any]


class Client:
    """Connection to one server: its model, and the request fields that it accepts. Use it as a context manager."""

    def __init__(
        self,
        url: str,
        model: str | None,
        *,
        endpoint: str = "completions",
        key: str | None = None,
        temperature: float = 0.0,
        timeout: float = 600.0,
        always: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock  # not the event loop's clock: its resolution may be only 1 ms
        self.base = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.endpoint = endpoint
        self.temperature = temperature
        self._key = key
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
        self._extras = OPTIONAL_FIELDS[0]
        self._always = always or {}  # fields of every request
        self._session: aiohttp.ClientSession | None = None

    @property
    def settings(self) -> ClientSettings:
        """Settings for `Client.of`. Complete after `discover`, which finds the model and the accepted fields."""
        timeout = self._timeout.total or math.inf
        return ClientSettings(
            self.base, self.model, self.endpoint, self._key, self.temperature, timeout, self._always, self._extras
        )

    @classmethod
    def of(cls, settings: ClientSettings) -> "Client":
        """A client with these settings. It need not call `discover`."""
        base, model, endpoint, key, temperature, timeout, always, extras = settings
        client = cls(base, model, endpoint=endpoint, key=key, temperature=temperature, timeout=timeout, always=always)
        client._extras = extras
        return client

    async def __aenter__(self) -> "Client":
        connector = aiohttp.TCPConnector(limit=0)  # no limit: requests never wait for a connection
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def asks_to_ignore_eos(self) -> bool:
        """Whether requests set ignore_eos. A server may reject that field."""
        return "ignore_eos" in self._extras

    async def discover(self, first: LoadRequest = FIRST_REQUEST) -> None:
        """Finds the server's model and the request fields that it accepts. Raises EngineError if it cannot serve.

        `first` is the request that is sent to find this out.
        """
        known = await self._models()
        if not self.model:
            if not known:
                raise EngineError(f"{self.base} names no models: pass --model")
            self.model = known[0]
        elif known and self.model not in known:
            raise EngineError(f"{self.base} has no model {self.model!r}; it has {', '.join(known)}")
        reply = Reply(0, 0.0, 0)
        for self._extras in OPTIONAL_FIELDS:
            reply = await self.send(first, 0, self.clock(), 0.0)
            if reply.status != 400 and reply.status != 422:
                break
        if reply.status != 200 and reply.retry_after is None:  # with Retry-After, the server is up and only busy
            raise EngineError(f"{self.base} does not answer a first request: {reply.error}")

    async def send(
        self, request: LoadRequest, number: int, start: float, due: float, reply: Reply | None = None
    ) -> Reply:
        """Sends one request now. `start` is the run's start on the clock; `due` is in seconds after it.

        If `reply` is given, it is filled in while the answer arrives.
        """
        assert self._session is not None
        reply = Reply(number, due, request.prompt_tokens) if reply is None else reply
        reply.asked_input, reply.asked_output = request.prompt_tokens, request.output_tokens
        try:
            body = msgspec.json.encode(self._body(request))
            reply.sent = self.clock() - start
            async with self._session.post(self.base + PATHS[self.endpoint], data=body) as response:
                reply.status = response.status
                if response.status != 200:
                    reply.retry_after = _retry_after(response.status, response.headers.get("retry-after"))
                    reply.error = _refusal(response.status, await response.read())
                else:
                    await _read(response, reply, start, self.clock)
        except TimeoutError:
            reply.error = f"no answer within {self._timeout.total:g} s"
        except Exception as error:  # any error: a request that was sent must not be missing from the figures
            reply.error = _one_line(error)
        if math.isnan(reply.end):
            reply.end = self.clock() - start
        return reply

    async def count(self, texts: list[str]) -> list[int]:
        """Token counts of prompts by the server: from /tokenize, or else from the usage of an answer."""
        gate = asyncio.Semaphore(CONCURRENT_COUNTS)

        async def one(text: str) -> int:
            async with gate:
                try:
                    found = await self._count_by_tokenize(text)
                    return await self._count_by_usage(text) if found is None else found
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise EngineError(f"counting tokens at {self.base}: {error or type(error).__name__}") from None

        return list(await asyncio.gather(*map(one, texts)))

    async def get(self, path: str) -> Any:
        """A JSON document of the server; None if it has none at this path."""
        assert self._session is not None
        try:
            async with self._session.get(self.base + path) as response:
                return msgspec.json.decode(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, *NO_JSON):
            return None

    async def _models(self) -> list[str]:
        assert self._session is not None
        try:
            async with self._session.get(self.base + "/v1/models") as response:
                if response.status == 404:
                    return []
                if response.status != 200:
                    raise EngineError(f"{self.base}/v1/models: {_refusal(response.status, await response.read())}")
                return [str(model["id"]) for model in msgspec.json.decode(await response.read())["data"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"no server answers at {self.base}: {error or type(error).__name__}") from None
        except (*NO_JSON, KeyError, TypeError):
            raise EngineError(f"{self.base}/v1/models does not look like a list of models: is the URL right?") from None

    async def _count_by_tokenize(self, text: str) -> int | None:
        assert self._session is not None
        body = {"model": self.model, **self._prompt(text)}
        async with self._session.post(self.base + "/tokenize", data=msgspec.json.encode(body)) as response:
            if response.status != 200:
                return None
            try:
                found = msgspec.json.decode(await response.read())
                count = found["count"] if "count" in found else len(found["tokens"])
            except (*NO_JSON, KeyError, TypeError):
                return None
            return count if isinstance(count, int) and count > 0 else None  # llama.cpp expects another field

    async def _count_by_usage(self, text: str) -> int:
        assert self._session is not None
        body = {"model": self.model, **self._prompt(text), "max_tokens": 1}
        async with self._session.post(self.base + PATHS[self.endpoint], data=msgspec.json.encode(body)) as response:
            if response.status != 200:
                raise EngineError(f"counting tokens: {_refusal(response.status, await response.read())}")
            try:
                return int(msgspec.json.decode(await response.read())["usage"]["prompt_tokens"])
            except (*NO_JSON, KeyError, TypeError):
                raise EngineError(
                    f"{self.base} tells no usage, by which tokens are counted: pass --tokenizer"
                ) from None

    def _prompt(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if self.endpoint == "chat" else {"prompt": text}

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        most = {"max_tokens": request.output_tokens, "temperature": self.temperature, "stream": True}
        prompt = {"prompt": request.ids} if request.ids else self._prompt(request.prompt)
        return {"model": self.model, **prompt, **most, **self._extras, **self._always}


Clock = Callable[[], float]


async def _read(response: aiohttp.ClientResponse, reply: Reply, start: float, clock: Clock) -> None:
    """Reads the events of a stream into `reply`. Events that arrive together get the same time."""
    rest, ended = b"", False
    async for data in response.content.iter_any():
        now = clock() - start
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            ended |= _read_event(event, reply, now)
    if rest.strip():
        ended |= _read_event(rest, reply, clock() - start)
    ended |= reply.has_finished
    if not reply.error and not ended:
        reply.error = f"the stream was cut after {len(reply.times)} chunks"
    if not reply.error and not reply.times and reply.has_finished and reply.output_tokens:
        reply.times.append(reply.begun)  # no token has text: an end of text, or a part of a character
    if not reply.error and not reply.times:
        reply.error = "the answer has no content"
    if not reply.output_tokens:
        reply.output_tokens, reply.is_without_usage = len(reply.times), True


def _read_event(event: bytes, reply: Reply, now: float) -> bool:
    """Reads one event into `reply`. Returns whether the stream ends with it."""
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    if not lines:
        return False
    if lines[0] == b"[DONE]":
        reply.end = now
        return True
    try:
        chunk = msgspec.json.decode(b"\n".join(lines))
        if error := chunk.get("error"):
            reply.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return True
        usage = chunk.get("usage") or {}
        choices = chunk.get("choices") or ()
        reply.output_tokens = _int_or_none(usage.get("completion_tokens")) or reply.output_tokens
        if choices:
            reply.begun = now if math.isnan(reply.begun) else reply.begun
            reply.has_finished |= bool(choices[0].get("finish_reason"))
            if _has_content(choices[0]):
                reply.times.append(now)
        if usage:
            reply.prompt_tokens = _int_or_none(usage.get("prompt_tokens")) or reply.prompt_tokens
            cached = _int_or_none((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
            reply.cached_tokens = reply.cached_tokens if cached is None else cached
        metrics = chunk.get("metrics")
        if isinstance(metrics, dict) and isinstance(metrics.get("ttft_ms"), int | float):
            reply.server = metrics
    except (*NO_JSON, AttributeError, KeyError, TypeError) as error:
        reply.error = f"an event that is none: {error}"
        return True
    return False


def _int_or_none(value: object) -> int | None:
    """The value if it is an int, else None: servers send all kinds of values here."""
    return value if isinstance(value, int) else None


def _has_content(choice: dict[str, Any]) -> bool:
    if choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    return delta is not None and any(delta.get(name) for name in CONTENT)


def _one_line(error: Exception) -> str:
    """The error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _retry_after(status: int, header: str | None) -> float | None:
    """Seconds until a refused request may be sent again; None if it is not a refusal or has no such header."""
    if status not in REFUSED or header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:  # a date, which LLM servers do not send
        return None
    return seconds if math.isfinite(seconds) else None


def _refusal(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body)
        error = error.get("error", error)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (*NO_JSON, AttributeError):
        text = body[:200].decode(errors="replace")
    return f"{status}: {text}"
