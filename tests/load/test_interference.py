"""What streams notice of long prompts, against a server that freezes for each of them."""

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.load import virtual
from tests.load.scripted import Script, ScriptedServer, scripted
from weft.errors import EngineError
from weft.load.ask import Ask
from weft.load.client import Client
from weft.load.interference import Seen, interfere

STREAMS = [Ask(0.0, "stream", 5, 1000)] * 3
PROMPTS = [Ask(0.0, "long", 5, 1), Ask(1.0, "long", 5, 1)]


def measured(length: int = 1000) -> Seen:
    """Streams with a token every 20 ms; a long prompt takes 300 ms, in which nobody gets anything."""

    async def run() -> Seen:
        server: ScriptedServer

        def script(body: dict[str, Any], number: int) -> Script:
            if body["prompt"] == "long":
                server.stalled_until = asyncio.get_running_loop().time() + 0.3
                return Script([0.3])
            return Script([0.02] * length)

        async with scripted(script) as server, Client(server.url, "scripted", clock=virtual.clock) as client:
            return await interfere(client, STREAMS, PROMPTS, quiet=1.0)

    return virtual.run(run())


def test_gaps_are_told_before_during_and_after() -> None:
    seen = measured()
    assert seen.ttfts == pytest.approx([0.3, 0.3])
    assert seen.read == pytest.approx(1.3)
    for quiet in (seen.before, seen.after):
        assert len(quiet) == pytest.approx(150, abs=6)
        assert np.median(quiet) == pytest.approx(0.02)
    assert seen.before.max() == pytest.approx(0.02)
    assert (seen.during > 0.25).sum() == 6, "each stream freezes twice"
    assert seen.during.max() <= 0.32 + 1e-9
    assert seen.times.max() <= 1.3 + 0.02 + 1e-9


def test_a_stream_that_ends_too_soon_is_no_witness() -> None:
    with pytest.raises(EngineError, match="ended before the long prompts were read"):
        measured(length=80)
