"""The recording of a server: frames over HTTP and in a file."""

import io
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import RunningServer, eventually
from weft.observe.blame import Cause, late_tokens
from weft.observe.frames import HEADER, StepFrame, read_frames
from weft.observe.recording import EngineRun, Recording

TEXT = "/v1/completions"
SMALL = ("--policy", "chunked", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "64MiB")


def recorded(server: RunningServer, since: str | None = None, **headers: str) -> tuple[Recording, str]:
    """Everything that the server has recorded, in as many parts as it takes."""
    data = b""
    while True:
        answer = server.http.get("/observe/frames", params={} if since is None else {"since": since}, headers=headers)
        answer.raise_for_status()
        assert answer.headers["content-type"] == "application/octet-stream"
        data += answer.content
        if since == answer.headers["x-weft-next"]:
            return Recording.of(read_frames(io.BytesIO(HEADER + data))), since
        since = answer.headers["x-weft-next"]


def tokens_of(run: EngineRun, key: int) -> list[StepFrame]:
    """The steps that sampled a token for a sequence."""
    ends = [step for step in run.steps if any(one == key and ends for one, _, _, ends in step.slices)]
    return ends + [step for step in run.steps if key in step.decode_keys]


def test_a_request_is_recorded_from_its_arrival_to_its_last_token(server: RunningServer) -> None:
    _, since = recorded(server)
    body = {"prompt": "Once upon a time there was a recording", "max_tokens": 12, "n": 2, "ignore_eos": True}
    answer = server.post(TEXT, body, headers={"x-request-id": "recorded-1"})
    usage = answer.json()["usage"]
    eventually(lambda: len(recorded(server, since)[0].runs[0].requests) >= 2, 10)
    (run,) = recorded(server, since)[0].runs
    requests = [request for request in run.requests.values() if "recorded-1" in request.request_id]
    assert [request.choice_index for request in requests] == [0, 1]
    for request in requests:
        prompt = run.prompts[request.key]
        assert request.reason == "length"
        assert (request.prompt_tokens, request.output_tokens) == (usage["prompt_tokens"], 12)
        assert prompt.prompt_tokens == usage["prompt_tokens"]
        steps = tokens_of(run, request.key)
        assert len(steps) == 12
        assert sum(tokens for step in run.steps for key, _, tokens, _ in step.slices if key == request.key) > 0
        assert request.started is not None
        assert request.first_token == steps[0].finished
        assert request.first_sent is not None
        moments = [request.arrival, request.parsed, prompt.time, steps[0].finished, request.first_sent]
        assert moments == sorted(moments)
    assert b"Once upon" not in server.http.get("/observe/frames").content  # no prompts, no texts


def test_the_first_frame_says_how_the_engine_runs(server: RunningServer) -> None:
    (run,) = recorded(server)[0].runs
    assert run.info is not None
    assert (run.info.engine, run.info.policy, run.info.max_num_seqs) == ("0", "chunked", 64)
    assert run.info.max_num_batched_tokens == 2048
    assert abs(run.info.epoch - time.time()) < 7200


@pytest.mark.parametrize("query", ["since=-1", "since=x", "seconds=nan", "since=1e99", "seconds=-5"])
def test_wrong_queries(server: RunningServer, query: str) -> None:
    answer = server.http.get(f"/observe/frames?{query}")
    assert answer.status_code == 400
    assert "must be a number, 0 or more" in answer.json()["error"]["message"]


def test_frames_of_the_last_seconds(server: RunningServer) -> None:
    server.post(TEXT, {"prompt": "a", "max_tokens": 2})
    time.sleep(1)
    server.post(TEXT, {"prompt": "b", "max_tokens": 2})
    few = Recording.of(read_frames(io.BytesIO(HEADER + server.http.get("/observe/frames?seconds=0.9").content)))
    assert few.runs[0].info is not None
    assert 1 <= len(few.runs[0].steps) < len(recorded(server)[0].runs[0].steps)
    assert len(few.runs[0].prompts) == 1


def test_a_refused_prompt_and_a_client_that_leaves(server: RunningServer) -> None:
    _, since = recorded(server)
    with server.http.stream("POST", TEXT, json={"prompt": "c", "max_tokens": 2000, "stream": True, "ignore_eos": True}):
        pass
    eventually(lambda: bool(recorded(server, since)[0].runs[0].requests), 10)
    (request,) = recorded(server, since)[0].runs[0].requests.values()
    assert request.reason == "abort"
    assert request.output_tokens < 2000


def test_the_prompt_that_made_streams_wait_is_blamed(server: RunningServer) -> None:
    """Over HTTP: while three clients stream, a fourth sends a prompt that takes several steps of 2,048 tokens."""
    _, since = recorded(server)
    began = [threading.Event() for _ in range(3)]

    def stream(number: int) -> None:
        body = {"prompt": [20 + number] * 40, "max_tokens": 150, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + TEXT, json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                began[number].set()

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    assert all(event.wait(30) for event in began)
    server.post(TEXT, {"prompt": [19] * 6100, "max_tokens": 1}, headers={"x-request-id": "document"})
    for thread in threads:
        thread.join(60)
    eventually(lambda: len(recorded(server, since)[0].runs[0].requests) == 4, 10)
    recording = recorded(server, since)[0]
    (run,) = recording.runs
    (document,) = [key for key, request in run.requests.items() if "document" in request.request_id]
    late = [one for one in late_tokens(run, recording, gap_goal=0.02) if one.token_index and one.key != document]
    for key in run.requests.keys() - {document}:
        longest = max((token for token in late if token.key == key), key=lambda token: token.seconds)
        assert longest.parts[0].cause is Cause.PREFILL
        assert longest.parts[0].keys[0] == document
        assert sum(part.seconds for part in longest.parts) == pytest.approx(longest.seconds)
    unexplained = [part.seconds for token in late for part in token.parts if part.cause is Cause.UNEXPLAINED]
    assert sum(unexplained) <= 0.05 * sum(token.seconds for token in late)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("record") / "r.weft"
    server = RunningServer(*SMALL, "--record", str(file), "--api-key", "alpha", "--api-key", "beta")
    yield server, file
    server.kill()


def test_a_key_sees_its_own_requests_and_others_as_anonymous_load(keyed: tuple[RunningServer, Path]) -> None:
    server, file = keyed
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("alpha", "beta")}
    assert server.http.get("/observe/frames").status_code == 401
    for name, headers in keys.items():
        answer = server.post(TEXT, {"prompt": name, "max_tokens": 3}, headers={**headers, "x-request-id": f"of-{name}"})
        assert answer.status_code == 200
    for name, headers in keys.items():
        eventually(lambda headers=headers: len(recorded(server, **headers)[0].runs[0].requests) == 2, 10)
        run = recorded(server, **headers)[0].runs[0]
        ids = [request.request_id for request in run.requests.values()]
        assert sorted(ids)[0] == ""
        assert f"of-{name}" in sorted(ids)[1]
        assert all(not prompt.prefix for prompt in run.prompts.values())
        assert len(run.steps) >= 6
    assert server.stop() == 0, server.log
    whole = Recording.read(file)  # for the operator: with all ids
    assert len(whole.runs[0].requests) == 2
    assert all("of-" in request.request_id and request.tenant for request in whole.runs[0].requests.values())
