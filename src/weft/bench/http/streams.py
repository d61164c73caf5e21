"""Many concurrent streams against a real server.

Checks that all are complete and in order, and measures the API process's CPU time per token.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from weft.errors import EngineError

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
FRAME = b"data: {"
TIMEOUT_S = 300.0  # for the server's start, and for one whole answer


@dataclass(frozen=True)
class StreamsResult:
    streams: int
    tokens: int  # streamed
    frames: int
    lost: int  # streams that did not end properly
    disordered: int  # streams with another text than the same request without streaming
    seconds: float  # from the first request to the last frame
    api_cpu: float  # CPU seconds of the API process in this time
    memory_before: int  # bytes of the API process, after a warm-up round
    memory_after: int

    @property
    def us_per_token(self) -> float:
        return self.api_cpu / max(1, self.tokens) * 1e6


class _Server:
    """`weft serve` in a separate process."""

    def __init__(self, process: asyncio.subprocess.Process, host: str, port: int) -> None:
        self.process, self.host, self.port = process, host, port

    @classmethod
    async def start(cls, arguments: list[str]) -> "_Server":
        command = (sys.executable, "-m", "weft", "serve", "--port", "0", *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            while line := await process.stdout.readline():
                if found := re.search(rb"on (http://\S+)", line):
                    address = urlsplit(found[1].decode())
                    return cls(process, address.hostname or "", address.port or 0)
        raise EngineError("the server did not come up; what it said is above")

    def cpu(self) -> float:
        """CPU seconds so far, user and kernel."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def memory(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", text)[0]) * 1024

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        await self.process.wait()

    async def ask(self, body: dict[str, object], seen: Callable[[], None] | None = None) -> bytes:
        """The raw HTTP response, headers included. `seen` is called for every frame."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        try:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: {self.host}\r\nconnection: close\r\n"
            writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            pieces = []
            async with asyncio.timeout(TIMEOUT_S):
                while piece := await reader.read(1 << 16):
                    pieces.append(piece)
                    if seen is not None:
                        for _ in range(piece.count(FRAME)):
                            seen()
            return b"".join(pieces)
        finally:
            writer.close()


async def measure(
    streams: int, max_tokens: int, arguments: list[str], progress: Callable[[int], None] = lambda frames: None
) -> StreamsResult:
    """Starts a server with `arguments`, opens `streams` streams at once, and reads all to the end."""
    server = await _Server.start([*arguments, "--policy", "chunked", "--max-num-seqs", str(streams)])
    try:
        await _round(server, streams, 4, True, lambda frames: None)  # warm-up: does the one-time allocations
        memory, cpu, started = server.memory(), server.cpu(), asyncio.get_running_loop().time()
        answers = await _round(server, streams, max_tokens, True, progress)
        seconds = asyncio.get_running_loop().time() - started
        cpu = server.cpu() - cpu
        await asyncio.sleep(1)
        after = server.memory()
        whole = await _round(server, streams, max_tokens, False, lambda frames: None)
    finally:
        await server.stop()
    found = [_read(answer) for answer in answers]
    wanted = [
        json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])["choices"][0]["text"] for answer in whole
    ]
    return StreamsResult(
        streams=streams,
        tokens=streams * max_tokens,
        frames=sum(frames for _, frames, _ in found),
        lost=sum(not good for _, _, good in found),
        disordered=sum(text != wish for (text, _, _), wish in zip(found, wanted, strict=True)),
        seconds=seconds,
        api_cpu=cpu,
        memory_before=memory,
        memory_after=after,
    )


async def _round(
    server: _Server, streams: int, max_tokens: int, stream: bool, progress: Callable[[int], None]
) -> list[bytes]:
    frames = 0

    def seen() -> None:
        nonlocal frames
        frames += 1
        progress(frames)

    wish = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    bodies = [{"prompt": f"Chapter {number}. It was", **wish} for number in range(streams)]
    return await asyncio.gather(*(server.ask(body, seen) for body in bodies))


def _read(answer: bytes) -> tuple[str, int, bool]:
    """Text, number of frames, and whether the stream ended properly."""
    chunks = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(FRAME)]
    good = bool(chunks) and b"data: [DONE]" in answer and "error" not in chunks[-1]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))
    ended = good and chunks[-1]["choices"][0]["finish_reason"] == "length"
    return text, len(chunks), ended
