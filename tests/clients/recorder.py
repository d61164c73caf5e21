"""Recorder: a proxy between a client and a server that notes every request and the kind of its answer."""

import asyncio
import json
import threading
from typing import Any

from aiohttp import ClientSession, web

KEPT = ("accept", "anthropic-beta", "anthropic-version", "content-type")  # headers that change what is answered


class Recorder:
    """Use it as a context; `url` is what the client is given. `requests` has what came, in order."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Recorder":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _open(self) -> None:
        self._session = ClientSession(auto_decompress=False)
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with self._session.request(
            request.method, self.server + request.path_qs, data=body, headers=headers
        ) as got:
            noted = {
                "method": request.method,
                "path": request.path_qs,
                "headers": {name: request.headers[name] for name in KEPT if name in request.headers},
                "body": json.loads(body) if body else None,
                "status": got.status,
                "content_type": got.content_type,
            }
            self.requests.append(noted)
            kind = {"content-type": got.headers.get("content-type", "application/octet-stream")}
            answer = web.StreamResponse(status=got.status, headers=kind)
            await answer.prepare(request)
            async for data in got.content.iter_any():
                await answer.write(data)
            await answer.write_eof()
            return answer
