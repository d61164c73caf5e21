"""Requests that real clients sent (see test_clients.py), sent again: each gets an answer of the same kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import RunningServer

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl"))


def requests() -> list[Any]:
    found = []
    for path in RECORDED:
        for number, line in enumerate(path.read_text().splitlines()):
            found.append(pytest.param(json.loads(line), id=f"{path.stem}-{number}"))
    return found


def test_there_are_recordings() -> None:
    assert len(RECORDED) >= 9


@pytest.mark.parametrize("request_", requests())
def test_a_recorded_request_is_answered(server: RunningServer, request_: dict[str, Any]) -> None:
    body = request_["body"]
    if body is not None and "model" in body:
        body = {**body, "model": server.get("/v1/models")["data"][0]["id"]}
    answer = server.http.request(request_["method"], request_["path"], json=body, headers=request_["headers"])
    assert answer.status_code == request_["status"], answer.text
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind == request_["content_type"]
    if kind == "text/event-stream":
        check_stream(answer.text)
    elif kind == "application/json":
        assert "error" not in answer.json() or answer.json()["error"] is None


def check_stream(text: str) -> None:
    events = [block for block in text.split("\n\n") if block]
    data = [block.rpartition("data: ")[2] for block in events]
    contents = [json.loads(one) for one in data if one != "[DONE]"]
    assert contents
    assert all("error" not in one or one["error"] is None for one in contents), contents[-1]
    last = contents[-1].get("type", "")
    assert data[-1] == "[DONE]" or last in ("response.completed", "response.incomplete", "message_stop")
