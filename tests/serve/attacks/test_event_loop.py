"""Requests that are small to send and much work for the process that hands out everybody's tokens."""

from typing import Any

import pytest

from tests.serve.attacks.victim import CALM, NOISE, Victim
from tests.serve.running import RunningServer

STOPS = [f"{number:03d}" + "ab" * 498 for number in range(64)]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n": 128, "max_tokens": 1, "stop": STOPS},
        {"prompt": ["a"] * 1024, "n": 2, "max_tokens": 1, "stop": STOPS},
    ],
    ids=["128 completions", "1,024 prompts"],
)
def test_stop_strings_for_many_completions(server: RunningServer, body: dict[str, Any]) -> None:
    with Victim(server) as victim:
        answer = server.post("/v1/completions", body, timeout=120)
    assert answer.status_code == 200
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"
