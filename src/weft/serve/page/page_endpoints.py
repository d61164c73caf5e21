"""PageEndpoints: the page's files, answers to its what-if questions, and its diagnosis."""

import sys
from collections.abc import Awaitable, Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from weft.serve.errors import ApiError
from weft.serve.http.middleware import send_json
from weft.serve.page.diagnosis import Diagnosis, DiagnosisFailed
from weft.serve.page.page_files import INDEX, PageFiles, send_file
from weft.serve.page.what_if_process import Superseded, WhatIfFailed, WhatIfProcess
from weft.serve.server_state import ServerState

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
MOST_QUESTION_BYTES = 4096
WHAT_IF = (sys.executable, "-m", "weft.sim.what_if")


class PageEndpoints:
    """Handlers of the page. Its files need no key; all data needs one."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._files = PageFiles()
        self._what_if = WhatIfProcess(WHAT_IF)
        self._diagnosis = Diagnosis(state.recording)
        self.open_paths = self._files.paths

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("/", "GET", self.file),
            # POST, because these compute: the origin of a web page is checked for a POST only.
            ("/page/profiles", "POST", self.profiles),
            ("/page/what_if", "POST", self.what_if),
            ("/page/diagnosis", "POST", self.diagnosis),
            ("/page/{name}", "GET", self.file),
        ]

    async def close(self) -> None:
        await self._what_if.close()
        await self._diagnosis.close()

    async def file(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._files.find(scope["path_params"].get("name", INDEX))
        if file is None:
            raise HTTPException(404)
        await send_file(file, scope["headers_by_name"].get(b"if-none-match", b""), send)

    async def profiles(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The device profiles that a question may name, with their limits."""
        await self._ask({}, scope["tenant"], send)

    async def what_if(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a question by simulation. The simulator checks its fields (weft/sim/what_if.py)."""
        try:
            data = await self._state.body_reader.read(scope, receive)
        except ConnectionResetError:
            raise ApiError(400, "the client has disconnected") from None
        if len(data) > MOST_QUESTION_BYTES:
            message = f"the question has {len(data):,} bytes; at most {MOST_QUESTION_BYTES:,} are read"
            raise ApiError(413, message, code="body_too_large")
        try:
            question = msgspec.json.decode(data)
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
        except msgspec.MsgspecError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
        await self._ask({"question": question}, scope["tenant"], send)

    async def diagnosis(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What hurts, from the frames of the last minute. {}: no request ran."""
        try:
            answer = await self._diagnosis.make(scope["tenant"])
        except DiagnosisFailed as error:
            raise ApiError(503, str(error), code="no_diagnosis", retry_after=5) from None
        await send_json(send, 200, answer)

    async def _ask(self, fields: dict[str, object], tenant: str, send: Send) -> None:
        info = self._state.engines.info
        profile = None if info is None else info.profile
        try:
            answer = await self._what_if.ask(msgspec.json.encode({**fields, "server": profile}), tenant)
        except Superseded:
            raise ApiError(409, "a newer question took the place of this one", code="superseded") from None
        except WhatIfFailed as error:
            raise ApiError(503, str(error), code="what_if_failed", retry_after=2) from None
        if answer.startswith(b'{"error"'):
            raise ApiError(400, msgspec.json.decode(answer)["error"], code="invalid_question")
        await send_json(send, 200, answer)
