"""Schemas of a few bytes that would take minutes and gigabytes to compile."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.attacks.test_connection import megabytes
from tests.serve.attacks.victim import CALM, NOISE, Victim
from tests.serve.running import RunningServer, eventually
from tests.strength import is_long

TEXT = "/v1/completions"
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
# What passes every check of numbers and counts, and takes many seconds all the same.
HEAVY: dict[str, Any] = {
    "type": "array",
    "prefixItems": [{"type": "integer", "multipleOf": 9973 - n} for n in range(120)],
}
# And what takes most of the time that it may.
FAIR: dict[str, Any] = {"type": "array", "prefixItems": HEAVY["prefixItems"][:12]}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "multipleOf": 9999991}, "multipleOf 9999991"),
        ({"type": "number", "multipleOf": 1.2345678}, "multipleOf 1.2345678"),
        ({"anyOf": [{"items": {"multipleOf": 99991}}]}, "multipleOf 99991"),
        ({"type": "object", "patternProperties": {f"^{n}x+$": {} for n in range(1500)}}, "1500 patterns"),
    ],
)
def test_numbers_and_counts_are_looked_at_first(server: RunningServer, schema: dict[str, Any], said: str) -> None:
    with Victim(server) as victim:
        answer = server.post(TEXT, {"prompt": "a", "max_tokens": 4, "guided_json": schema})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"


@pytest.mark.parametrize("step", [7, 0.25, 10000, 5000000, 0.001])
def test_ordinary_steps_are_served(server: RunningServer, step: float) -> None:
    body = {"prompt": "a", "max_tokens": 4, "guided_json": {"type": "number", "multipleOf": step}}
    assert server.post(TEXT, body).status_code == 200


def test_what_takes_too_much_is_given_up(server: RunningServer) -> None:
    before = megabytes(server.process.pid)
    with Victim(server) as victim:
        answer = server.post(TEXT, {"prompt": "a", "max_tokens": 4, "guided_json": HEAVY})
        assert answer.status_code == 400
        assert "simplify it" in answer.json()["error"]["message"]
    assert megabytes(server.process.pid) - before < 40
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 4, "guided_json": GOOD}).status_code == 200


def test_what_is_large_and_taken_disturbs_no_stream(server: RunningServer) -> None:
    with Victim(server) as victim:
        answer = server.post(TEXT, {"prompt": "a", "max_tokens": 4, "guided_json": FAIR})
    assert answer.status_code == 200
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"


def test_the_work_ends_with_its_client(server: RunningServer) -> None:
    with pytest.raises(httpx.ReadTimeout):
        server.post(TEXT, {"prompt": "a", "max_tokens": 4, "guided_json": {**HEAVY, "title": "x"}}, timeout=0.5)
    server.wait_until_idle()
    eventually(lambda: server.get("/load")["server_load"] == 0, 5)
    eventually(lambda: not any(map(computes, checkers(server))), 1.5)


def checkers(server: RunningServer) -> list[Path]:
    """Processes of the server that compile schemas."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [Path("/proc", pid) for pid in children if b"checker" in Path("/proc", pid, "cmdline").read_bytes()]


def computes(process: Path) -> bool:
    try:
        return process.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] == "R"
    except FileNotFoundError:  # it has just ended
        return False


def test_the_server_ends_in_time_with_schemas_under_way() -> None:
    server = RunningServer("--policy", "chunked", "--kv-cache-memory-bytes", "64MiB", "--shutdown-timeout", "1")
    with pytest.raises(httpx.ReadTimeout):
        server.post(TEXT, {"prompt": "a", "max_tokens": 4, "guided_json": HEAVY}, timeout=0.3)
    started = time.monotonic()
    assert server.stop() == 0, server.log
    assert time.monotonic() - started < 10


def test_one_large_schema_for_many_prompts(server: RunningServer) -> None:
    """Each had a matcher of its own while it waited: a stream stood still for 0.7 s beside 1,024 of them, and the
    engine took up to 4.6 GB."""
    properties = {
        f"property_number_{number:05d}": {"type": "string", "minLength": number % 7} for number in range(1200)
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    prompts = 256 if is_long() else 64
    with Victim(server) as victim:
        body = {"prompt": ["a"] * prompts, "max_tokens": 3, "guided_json": schema}
        answer = server.post("/v1/completions", body, timeout=120)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == prompts
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"
