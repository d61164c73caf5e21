"""Builds a server, runs it, and shuts it down in order."""

import asyncio
import hashlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

import uvicorn

from weft import __version__
from weft.core import Source
from weft.engine.options import EngineOptions
from weft.engine.pooling import pooling_of
from weft.errors import ModelError, OptionError
from weft.llm import recommended_params, resolve_model_path
from weft.observe.metrics import ServerMetrics
from weft.observe.recording_buffer import RecordingBuffer
from weft.observe.recording_file import RecordingFile
from weft.observe.tracing import Tracer
from weft.serve.app import build_app
from weft.serve.endpoints.response_generator import SHUT_DOWN
from weft.serve.engines.engine_pool import EnginePool
from weft.serve.engines.messages import EngineInfo, EngineProcessConfig, clock
from weft.serve.http.body_reader import BodyReader
from weft.serve.http.http_connection import HttpConnection
from weft.serve.http.rate_limits import RateLimits
from weft.serve.options import ServeOptions
from weft.serve.requests.request_parser import RequestParser
from weft.serve.requests.structure_checker import StructureChecker
from weft.serve.requests.template_check import TemplateCheck, TemplateCheckResult
from weft.serve.requests.text_processor import TextProcessor
from weft.serve.server_state import ServerState
from weft.text.reasoning import REASONING_PARSERS, detect_reasoning
from weft.text.tools import TOOL_PARSERS, detect_tool_format

DEFAULT_NAME = "weft-default"  # name of the model that ships with weft
# Seconds that a thread may hold the GIL while the event loop waits for it. Python's default is 0.005.
GIL_SWITCH_S = 0.0005
KEEP_ALIVE_S = 75  # seconds that an idle connection stays open: longer than most proxies keep theirs
MOST_FILES = 65536  # open file descriptors to ask the system for
FINAL_FRAMES_S = 0.2  # seconds to send the final error frames
BACKLOG = 4096  # connections that may wait for accept()


def serve(options: ServeOptions, engine_options: EngineOptions, engines: int = 1) -> int:
    """Runs the server, with so many engine processes, until a signal comes. Returns the exit code."""
    listener = _listen(options.host, options.port)
    try:
        state = _build(options, engine_options, engines)
        sys.setswitchinterval(GIL_SWITCH_S)
        _allow_many_connections()
        _say(f"loading {state.model_names[0]}")
        code = _run(state, listener)
    finally:
        listener.close()
    if state.parser.texts.is_busy:  # a thread still works for a client that has left: do not wait for it
        sys.stdout.flush()
        os._exit(code)
    return code


def _build(options: ServeOptions, engine_options: EngineOptions, engines: int) -> ServerState:
    """The server, with the model files that the API process needs. Engine processes read the rest."""
    path = resolve_model_path(engine_options.model)
    chats = options.chat_template, options.chat_template_content_format
    with closing(TemplateCheck(path, *chats)) as check:
        texts = TextProcessor(path, *chats)
        _check_template(check.result())
    names = options.served_model_name or (engine_options.model or DEFAULT_NAME,)
    template = texts.template.source
    parser = RequestParser(
        texts=texts,
        defaults=recommended_params(path),
        model=names[0],
        tool_parser=_parser(options.tool_call_parser, TOOL_PARSERS, "tool_call_parser", detect_tool_format(template)),
        reasoning_parser=_parser(
            options.reasoning_parser, REASONING_PARSERS, "reasoning_parser", detect_reasoning(template)
        ),
        checker=StructureChecker(),
        pooling=_pooling(path),
        fingerprint=_fingerprint(path, engine_options),
        max_logprobs=options.max_logprobs,
        tokens_as_ids=options.return_tokens_as_token_ids,
        usage_in_last_chunk=options.enable_force_include_usage,
    )
    metrics = ServerMetrics(
        names[0],
        engines=[str(number) for number in range(engines)],
        enable_prefix_caching=engine_options.enable_prefix_caching,
        gpu_memory_utilization=engine_options.gpu_memory_utilization,
    )
    eos = texts.tokenizer.eos_token_id if texts.tokenizer is not None else None
    eos_ids = () if eos is None else (eos,)
    config = EngineProcessConfig("", str(path.resolve()), eos_ids, asdict(engine_options), options.record_steps)
    file = None if options.record is None else RecordingFile(Path(options.record), options.record_max_bytes)
    recording = RecordingBuffer(file)
    return ServerState(
        options=options,
        engine_options=engine_options,
        model_names=names,
        parser=parser,
        engines=EnginePool(config, metrics, _say, recording=recording),
        metrics=metrics,
        tracer=Tracer.make(options.otlp_traces_endpoint),
        recording=recording,
        rate_limits=RateLimits(options.requests_per_minute, options.max_concurrent_requests),
        body_reader=BodyReader(int(options.max_body_mb * 1e6)),
        created=int(time.time()),
    )


def _pooling(path: Path) -> str:
    """How the model pools, or "" if that is not supported. The model can still generate text."""
    try:
        return pooling_of(path)
    except ModelError as error:
        _say(f"embeddings will be refused: {error}")
        return ""


def _fingerprint(path: Path, options: EngineOptions) -> str:
    """A hash of weft's version, the model path and the engine options. Answers may differ when it differs."""
    text = repr((__version__, str(path.resolve()), sorted(asdict(options).items())))
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _check_template(found: TemplateCheckResult) -> None:
    if found.broken is not None:
        raise ModelError(f"{found.broken}; give another with --chat-template")
    if found.refused is not None:
        _say(f"chats may fail: a greeting does ({found.refused})")


def _parser(chosen: str | None, known: Iterable[str], option: str, detected: str | None) -> str | None:
    if chosen is None or chosen == "auto":
        return detected
    if chosen == "none":
        return None
    if chosen not in known:
        raise OptionError(f"{option}={chosen!r} is unknown: choose auto, none, {', '.join(known)}")
    return chosen


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket. Binding comes before loading, so that a port in use is reported at once."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OptionError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
    return listener


def _allow_many_connections() -> None:
    """Raises the limit of open files. Each stream needs one, and the default of many systems is about a thousand."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run(state: ServerState, listener: socket.socket) -> int:
    config = uvicorn.Config(
        build_app(state),
        loop="auto",
        http=HttpConnection,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,  # our own graceful shutdown (`_drain`) is over by then
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        ssl_certfile=state.options.ssl_certfile,
        ssl_keyfile=state.options.ssl_keyfile,
    )
    for name in ("uvicorn.error", "asyncio"):  # they log one entry per failure: limit the rate
        logging.getLogger(name).addFilter(state.error_log)
    process = _UvicornServer(config, state, listener)
    process.run(sockets=[listener])
    return process.exit_code


class _UvicornServer(uvicorn.Server):
    """uvicorn, but signals let running requests finish, and the server exits if the engine cannot be started."""

    def __init__(self, config: uvicorn.Config, state: ServerState, listener: socket.socket) -> None:
        super().__init__(config)
        self.state = state
        self.listener = listener
        self.exit_code = 0
        self._ending: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
            loop.add_signal_handler(number, self._signalled, number)
        watching = asyncio.create_task(self._watch_engine())
        try:
            await self._serve(sockets)
        finally:
            watching.cancel()

    def _signalled(self, number: int) -> None:
        if self._ending is not None:  # second signal
            _say("ending at once")
            self.state.engines.fail_requests(SHUT_DOWN)
            # Does not wait for busy threads. The engine process ends when this process does.
            asyncio.get_running_loop().call_later(FINAL_FRAMES_S, os._exit, 128 + number)
            return
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Waits up to shutdown_timeout for running requests, then exits. Probes and refusals are still answered."""
        state, timeout = self.state, self.state.options.shutdown_timeout
        state.drain()
        if state.active:
            _say(f"{state.active} requests may take {timeout:g} s to finish; a second signal ends them at once")
        with suppress(TimeoutError):
            await asyncio.wait_for(state.drained.wait(), timeout)
        if state.active:
            state.engines.fail_requests(SHUT_DOWN)
            await asyncio.sleep(FINAL_FRAMES_S)
        self.should_exit = True

    async def _watch_engine(self) -> None:
        """Announces the first time that an engine is ready. Ends the server if all engines have failed."""
        started, engines = clock(), self.state.engines
        is_announced = False
        while engines.failure is None:
            await engines.changed.wait()
            engines.changed.clear()
            if engines.info is not None and not is_announced:
                is_announced = True
                self.state.garbage_collection.freeze()
                seconds = clock() - started
                while not self.started:  # uvicorn listens only from then on
                    await asyncio.sleep(0.002)
                self._announce(seconds)
        _say(engines.failure)
        self.exit_code = 1
        self.state.drain()
        self.should_exit = True

    def _announce(self, seconds: float) -> None:
        host, port = self.listener.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        scheme = "http" if self.state.options.ssl_certfile is None else "https"
        url, name = f"{scheme}://{shown}:{port}", self.state.model_names[0]
        info = self.state.engines.info
        key = " -H 'Authorization: Bearer KEY'" if self.state.options.api_key else ""
        print(f"\nweft serves {name} on {url} (ready after {seconds:.1f} s)")
        if info is not None and info.has_targets:
            for line in _targets(info):
                print(f"  {line}")
        if shown in ("127.0.0.1", "localhost", "[::1]") and host not in ("0.0.0.0", "::"):
            print("  open to this machine only; --host 0.0.0.0 opens it to the network")
        if self.state.options.page:
            print(f"  look:     {url}/ in a browser: chat, live timeline, diagnosis")
        print(
            f"  try it:   curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n"
            f'              -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n',
            flush=True,
        )


def _targets(info: EngineInfo) -> list[str]:
    """Lines for the start-up message: targets that are promised, targets that are not, and the calibration quality."""
    targets = info.targets
    texts: dict[bool, list[str]] = {True: [], False: []}  # of the targets, by whether they are promised
    if targets.gap < math.inf:
        texts[targets.gap_source > Source.DEFAULT].append(f"{targets.gap * 1000:,.4g} ms between tokens")
    if targets.ttft < math.inf:
        more = f" + {targets.ttft_per_1k * 1000:.3g} ms per 1,000 prompt tokens" if targets.ttft_per_1k else ""
        texts[targets.ttft_source > Source.DEFAULT].append(f"{targets.ttft * 1000:,.6g} ms{more} to the first")
    lines = []
    if texts[True]:
        refusal = "; what could not be in time is refused (503)" if targets.ttft_source > Source.DEFAULT else ""
        lines.append(f"promised: {', '.join(texts[True])}{refusal}")
    if texts[False]:
        lines.append(f"aims at:  {', '.join(texts[False])}; nothing is promised or refused (--ttft-target-ms promises)")
    if info.calibration_quality:
        lines.append(f"measured: {info.calibration_quality}")
    return lines


def _say(line: str | None) -> None:
    print(f"weft: {line}", file=sys.stderr, flush=True)
