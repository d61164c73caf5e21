"""A server of the page's files and of frames that a test chooses. It has no engine."""

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from aiohttp import web

from weft.observe.frames import EngineFrame, Frame, PromptFrame, StepFrame, encode_frame, packed
from weft.serve.page.page_files import HEADERS, INDEX, PageFiles

GAP = 0.05  # seconds; the gap target of all requests


class SyntheticServer:
    """Runs in a thread. `answers` are the texts of the chunks that a chat gets."""

    def __init__(self, port: int = 0, model: str = "synthetic") -> None:
        self.frames: list[bytes] = []
        self.answers: list[str] = ["hello"]
        self.model = model
        self._files = PageFiles()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner, self.port = asyncio.run_coroutine_threadsafe(self._start(port), self._loop).result(30)
        self.url = f"http://127.0.0.1:{self.port}"

    async def _start(self, port: int) -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._file),
                web.get("/page/{name}", self._file),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._info),
                web.get("/observe/frames", self._frames),
                web.post("/v1/chat/completions", self._chat),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        return runner, runner.addresses[0][1]

    def add(self, frames: Iterable[Frame]) -> None:
        self.frames += [encode_frame(frame) for frame in frames]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _file(self, request: web.Request) -> web.Response:
        file = self._files.find(request.match_info.get("name", INDEX))
        if file is None:
            raise web.HTTPNotFound
        headers = {name.decode(): value.decode() for name, value in HEADERS}
        return web.Response(body=file.body, headers={**headers, "content-type": file.content_type.decode()})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 2048}]})

    async def _info(self, request: web.Request) -> web.Response:
        engine = {"device": self.model, "policy": "slo", "gap_target": GAP, "gap_source": 1}
        return web.json_response({"version": "0", "engine": engine})

    async def _frames(self, request: web.Request) -> web.Response:
        since = min(int(request.query.get("since", 0)), len(self.frames))
        return web.Response(body=packed(self.frames[since:]), headers={"x-weft-next": str(len(self.frames))})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for text in self.answers:
            chunk = {"choices": [{"delta": {"content": text, "reasoning_content": text}, "finish_reason": None}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def engine_frame(time: float = 0.0, model: str = "synthetic") -> EngineFrame:
    return EngineFrame(
        "0", time, 0.0, "0", model, "none", "slo", GAP, True, 1.0, 0.25, False, 2000, 9000, 16, True, 2048
    )


def prompt_frame(key: int, arrival: float, prompt_tokens: int = 32, max_tokens: int = 100) -> PromptFrame:
    none: Any = None
    return PromptFrame(
        "0", key, arrival + 0.001, arrival, prompt_tokens, max_tokens, GAP, True, 1.0, none, False, 0, False
    )


def step_frame(
    number: int,
    started: float,
    finished: float,
    decodes: Iterable[int] = (),
    slices: Iterable[tuple[int, int, int, bool]] = (),
    preempted: Iterable[int] = (),
    waits_for: Any = "",
) -> StepFrame:
    keys = np.array([*decodes], np.int32)
    return StepFrame(
        engine="0",
        number=number,
        started=started,
        finished=finished,
        predicted=None,
        decodes=keys.tobytes(),
        slices=[*slices],
        shape=(0, 0.0, 0, 0, 0.0, 0.0),
        host=(0.0, 0.0, 0.0, 0.0),
        prefill_limit="",
        waits_for=waits_for,
        preempted=[*preempted],
        running=len(keys),
        waiting=0,
        queued_tokens=0,
        free_blocks=4500,
        cached_tokens=0,
        lost_tokens=0,
        starved=False,
    )
