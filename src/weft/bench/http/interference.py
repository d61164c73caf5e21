"""Interference, measured by a client: the effect of other requests' long prompts on streams that decode."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.bench.http.client import Client, Reply
from weft.bench.http.load_request import LoadRequest
from weft.errors import EngineError

POLL_S = 0.02  # time between checks of the streams' progress
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ObservedInterference:
    """What a client observes in one run. Times are seconds; a gap is the time between two chunks of a stream."""

    before: Array  # gaps after all streams have begun and before the first long prompt is due
    during: Array  # gaps from then until the last long prompt has its first token
    after: Array
    times: Array  # when the gaps of `during` ended, since the first long prompt was due
    read: float  # from then until the last long prompt had its first token
    ttfts: list[float]  # of the long prompts, from when each was to be sent


async def interfere(
    client: Client,
    streams: Sequence[LoadRequest],
    prompts: Sequence[LoadRequest],
    *,
    quiet: float = 3.0,
    timeout: float = 600.0,
) -> ObservedInterference:
    """Starts the streams, lets them decode for `quiet` seconds, and sends each prompt at its time (`LoadRequest.at`).

    Measures for `quiet` seconds more, then cancels the streams. They must request more tokens than they can produce in
    this time.
    """
    clock, start = client.clock, client.clock()
    decoding = [Reply(number, 0.0, request.prompt_tokens) for number, request in enumerate(streams)]
    tasks = [
        asyncio.create_task(client.send(request, reply.number, start, 0.0, reply))
        for request, reply in zip(streams, decoding, strict=True)
    ]
    try:
        async with asyncio.timeout(timeout):
            while not all(reply.times for reply in decoding):
                _check(decoding, "did not begin")
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(quiet)
            began = clock() - start

            async def later(number: int, request: LoadRequest) -> Reply:
                await asyncio.sleep(max(0.0, began + request.at - (clock() - start)))
                return await client.send(request, number, start, began + request.at)

            sent = [later(len(streams) + number, request) for number, request in enumerate(prompts)]
            answers = await asyncio.gather(*sent)
            _check(answers, "was not answered")
            ended = max(reply.times[0] for reply in answers)
            _check(decoding, "was cut off")
            if any(task.done() for task in tasks):
                raise EngineError("a stream ended before the long prompts were read: make these shorter")
            await asyncio.sleep(quiet)
    except TimeoutError:
        raise EngineError(f"the long prompts were not read within {timeout:g} s: make them shorter") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps = np.concatenate([np.empty(0), *(np.diff(reply.times) for reply in decoding)])
    ends = np.concatenate([np.empty(0), *(reply.times[1:] for reply in decoding)])
    decode = ends - gaps >= max(reply.times[0] for reply in decoding)  # earlier, other streams are still in prefill
    before, after = decode & (ends < began), ends - gaps >= ended
    during = (ends >= began) & ~after  # includes a gap that spans the end of the long prefills
    first = [reply.times[0] - reply.due for reply in answers]
    return ObservedInterference(gaps[before], gaps[during], gaps[after], ends[during] - began, ended - began, first)


def _check(replies: Sequence[Reply], what: str) -> None:
    for reply in replies:
        if reply.error:
            raise EngineError(f"request {reply.number} {what}: {reply.error}")
