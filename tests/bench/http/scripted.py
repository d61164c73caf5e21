"""A server that answers by a script: after which delay each chunk comes, and what goes wrong."""

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """One answer. Delays are seconds before each chunk; every chunk carries `tokens` tokens."""

    delays: list[float] = field(default_factory=lambda: [0.0])
    tokens: int = 1
    status: int = 200
    retry_after: str | None = None  # the header of a refusal
    cut_after: int | None = None  # chunks, after which the connection is closed
    error_after: int | None = None  # chunks, after which an error frame comes
    tells_usage: bool = True
    says_done: bool = True  # at the end of the events
    lingers: float = 0.0  # seconds from there to the end of the message
    beside: dict[str, Any] = field(default_factory=dict)  # in every chunk
    delta: Callable[[int], dict[str, Any]] = lambda index: {"content": "a"}


class ScriptedServer:
    """Speaks HTTP/1.1 as far as a client of completions needs it."""

    def __init__(self, script: Callable[[dict[str, Any], int], Script]) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.refused_fields: set[str] = set()
        self.count: Callable[[str], int] | None = None  # tokens of a prompt; None: there is no way to ask for them
        self.tokenizes = True  # where they are counted: else only the usage of an answer tells them
        self.counting = 0.0  # seconds that /tokenize takes
        self.counts = 0  # how often it was asked
        self.longest_counted = 0  # tokens
        self.longest: int | None = None  # tokens of the context
        self.stalled_until = 0.0  # on the loop's clock: nothing is sent before
        self.url = ""

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                method, path, _ = head.split(b" ", 2)
                if method == b"GET":
                    found = {"data": [{"id": "scripted", "max_model_len": self.longest}]}
                    writer.write(_whole(200, found) if path == b"/v1/models" else _whole(404, {}))
                elif path == b"/tokenize":
                    self.counts += 1
                    await asyncio.sleep(self.counting)
                    counted = self.count is not None and self.tokenizes
                    writer.write(_whole(200, self._counted(json.loads(body))) if counted else _whole(404, {}))
                elif not await self.answer(json.loads(body), writer):
                    break
        writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Whether the connection lives on."""
        if self.refused_fields & body.keys():
            writer.write(_whole(400, {"error": {"message": "unknown field"}}))
            return True
        script = self.script(body, len(self.bodies))
        self.bodies.append(body)
        if script.status != 200:
            writer.write(_whole(script.status, {"error": {"message": "not now"}}, script.retry_after))
            return True
        if not body.get("stream"):
            writer.write(_whole(200, {"usage": {"prompt_tokens": self._counted(body)["count"]}}))
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        clock = asyncio.get_running_loop().time
        due, chat = clock(), "messages" in body
        read = 5 if self.count is None else self._counted(body)["count"]
        continuous = (body.get("stream_options") or {}).get("continuous_usage_stats")
        for index, delay in enumerate(script.delays):
            due = max(due + delay, self.stalled_until)
            await asyncio.sleep(max(0.0, due - clock()))
            if index == script.cut_after:
                return False
            if index == script.error_after:
                _event(writer, {"error": {"message": "the engine died"}})
                break
            choice: dict[str, Any] = {"index": 0, "delta": script.delta(index)} if chat else {"index": 0, "text": "a"}
            choice["finish_reason"] = "length" if index == len(script.delays) - 1 else None
            usage = {"prompt_tokens": read, "completion_tokens": (index + 1) * script.tokens}
            told = {"usage": usage} if continuous and script.tells_usage else {}
            _event(writer, {"choices": [choice], **told, **script.beside})
            await writer.drain()
        else:
            if script.tells_usage and body.get("stream_options"):
                usage = {"prompt_tokens": read, "completion_tokens": len(script.delays) * script.tokens}
                _event(writer, {"choices": [], "usage": usage})
        if script.says_done:
            _frame(writer, b"data: [DONE]\n\n")
        await asyncio.sleep(script.lingers)
        writer.write(b"0\r\n\r\n")
        return True

    def _counted(self, body: dict[str, Any]) -> dict[str, int]:
        assert self.count is not None
        tokens = self.count(body["messages"][0]["content"] if "messages" in body else body["prompt"])
        self.longest_counted = max(self.longest_counted, tokens)
        return {"count": tokens}


@contextlib.asynccontextmanager
async def scripted(script: Callable[[dict[str, Any], int], Script]) -> AsyncIterator[ScriptedServer]:
    found = ScriptedServer(script)
    server = await asyncio.start_server(found.connection, "127.0.0.1", 0, backlog=1024)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


@contextlib.contextmanager
def beside(script: Callable[[dict[str, Any], int], Script]) -> Iterator[ScriptedServer]:
    """The same on a thread of its own, for clients in other processes. There is no virtual clock."""
    started: queue.Queue[tuple[ScriptedServer, Callable[[], object]]] = queue.Queue()

    async def serve() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        async with scripted(script) as server:
            started.put((server, lambda: loop.call_soon_threadsafe(stopped.set)))
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    server, stop = started.get(timeout=10)
    try:
        yield server
    finally:
        stop()
        thread.join(10)


def _event(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
    _frame(writer, b"data: " + json.dumps(data).encode() + b"\n\n")


def _frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _whole(status: int, data: dict[str, Any], retry_after: str | None = None) -> bytes:
    body = json.dumps(data).encode()
    more = b"" if retry_after is None else b"retry-after: %s\r\n" % retry_after.encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%scontent-length: %d\r\n\r\n%s" % (
        status,
        more,
        len(body),
        body,
    )
