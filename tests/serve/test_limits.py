"""Keys, limits and promises: who may ask for how much, and what comes of it."""

import asyncio
import json
import re
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.serve.running import RunningServer, store_calibration

TEXT = "/v1/completions"
SMALL = ("--max-num-seqs", "64", "--kv-cache-memory-bytes", "128MiB")


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    keys = ("--api-key", "alpha", "--api-key", "beta")
    limits = ("--max-concurrent-requests", "4", "--requests-per-minute", "40")
    origin = ("--allowed-origins", "https://chat.example.org")
    foreign = ("--tensor_parallel_size=1", "--trust-remote-code", "--disable-log-requests", "--max-model-len", "4k")
    names = ("--served-model-name", "a", "b")
    server = RunningServer(*SMALL, *keys, *limits, *origin, *foreign, "--policy", "chunked", *names)
    server.http.headers["authorization"] = "Bearer alpha"
    yield server
    server.kill()


@pytest.fixture(scope="module")
def promising(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With generous promises: machines that run tests are slow at times."""
    cache = tmp_path_factory.mktemp("cache")
    store_calibration(cache, *SMALL)
    server = RunningServer(
        *SMALL,
        *("--gap-target-ms", "2000", "--ttft-target-ms", "20000", "--min-gap-target-ms", "1000"),
        XDG_CACHE_HOME=str(cache),
    )
    yield server
    server.kill()


@pytest.mark.parametrize("header", [None, "Bearer gamma", "Bearer", "Basic alpha", "alpha", "Bearer alpha beta"])
def test_who_has_no_key_gets_nothing(guarded: RunningServer, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    with httpx.Client(base_url=guarded.url, headers=headers) as client:
        for path in ("/v1/models", "/metrics", "/load", "/server_info", "/openapi.json", "/nothing"):
            assert client.get(path).status_code == 401, path
        for path in (TEXT, "/v1/chat/completions", "/tokenize", "/detokenize", "/reset_prefix_cache"):
            answer = client.post(path, content=b"{")
            assert answer.status_code == 401, path
            assert answer.json()["error"]["type"] == "authentication_error"
        for path in ("/health", "/ready", "/version"):
            assert client.get(path).status_code == 200


def test_keys_are_shown_nowhere(guarded: RunningServer) -> None:
    info = guarded.http.get("/server_info").text
    assert "alpha" not in info
    assert "beta" not in info
    assert [card["id"] for card in guarded.get("/v1/models")["data"]] == ["a", "b"]


def test_one_key_cannot_see_what_another_has_cached(guarded: RunningServer) -> None:
    prompt = "The quick brown fox jumps over the lazy dog and runs away from the old house by the sea. " * 4

    def cached(key: str, **more: object) -> int:
        headers = {"authorization": f"Bearer {key}"}
        answer = guarded.post(TEXT, {"prompt": prompt, "max_tokens": 1, **more}, headers=headers)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alpha") == 0
    assert cached("alpha") > 0
    assert cached("beta") == 0
    assert cached("alpha", cache_salt="mine") == 0
    assert guarded.http.post("/reset_prefix_cache").status_code == 200
    assert cached("alpha") == 0


def test_limits_of_a_key(guarded: RunningServer) -> None:
    async def scenario() -> list[httpx.Response]:
        headers = {"authorization": "Bearer beta"}
        async with httpx.AsyncClient(base_url=guarded.url, headers=headers, timeout=60) as client:
            body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
            crowd = await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(8)))
            many = [await client.post(TEXT, json={"prompt": "x", "max_tokens": 1}) for _ in range(45)]
            return [*crowd, *many]

    answers = asyncio.run(scenario())
    codes = [answer.json()["error"]["code"] for answer in answers if answer.status_code == 429]
    assert {"concurrency", "rate_limit"} == set(codes)
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
    assert {answer.status_code for answer in answers} == {200, 429}
    assert guarded.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200  # another key


def test_a_full_queue_is_refused(tmp_path: object) -> None:
    limits = ("--max-queued-requests", "4", "--max-queued-tokens", "3000", "--policy", "chunked")
    server = RunningServer("--max-num-seqs", "2", "--kv-cache-memory-bytes", "64MiB", *limits)
    try:

        async def scenario() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
                crowd = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(20)]
                await asyncio.sleep(0.5)
                long = [client.post(TEXT, json={"prompt": "word " * 1000, "max_tokens": 1}) for _ in range(4)]
                return [*await asyncio.gather(*long), *await asyncio.gather(*crowd)]

        answers = asyncio.run(scenario())
        refused = [answer for answer in answers if answer.status_code == 503]
        assert refused
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
        assert all("retry-after" in answer.headers for answer in refused)
        assert sum(answer.status_code == 200 for answer in answers) >= 2
        server.wait_until_idle()
    finally:
        server.kill()


def test_promises_in_headers_and_in_the_last_chunk(promising: RunningServer) -> None:
    def ask(**headers: str) -> httpx.Response:
        return promising.post(TEXT, {"prompt": "The sea", "max_tokens": 3}, headers=headers)

    plain = ask()
    assert plain.headers["x-slo-gap-ms"] == "2000"
    assert float(plain.headers["x-slo-ttft-ms"]) == pytest.approx(20000, rel=0.01)
    own = ask(**{"x-slo-gap-ms": "3000", "x-slo-ttft-ms": "30000"})
    assert (own.headers["x-slo-gap-ms"], own.headers["x-slo-ttft-ms"]) == ("3000", "30000")
    raised = ask(**{"x-slo-tpot-ms": "1"})
    # What all are promised comes first. Less is given while that costs the others nothing, and is not promised.
    assert raised.headers["x-slo-gap-ms"] == "2000"
    assert raised.json()["metrics"]["gap_target_ms"] == 2000
    batch = promising.post(TEXT, {"prompt": "The sea", "max_tokens": 3, "service_tier": "flex"})
    assert "x-slo-gap-ms" not in batch.headers
    assert batch.json()["metrics"]["gap_target_ms"] is None
    both = promising.post(TEXT, {"prompt": "x", "service_tier": "flex"}, headers={"x-slo-gap-ms": "50"})
    assert both.status_code == 400


def test_a_deadline_that_cannot_be_met_is_refused_with_the_prediction(promising: RunningServer) -> None:
    answer = promising.post(TEXT, {"prompt": "word " * 6000, "max_tokens": 1}, headers={"x-slo-ttft-ms": "1"})
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "deadline"
    assert error["predicted_ttft_ms"] > error["ttft_target_ms"] == 1
    assert int(answer.headers["retry-after"]) >= 1
    assert promising.metric('weft_requests_refused_total{reason="deadline"}') == 1


def test_promises_in_anthropics_api(promising: RunningServer) -> None:
    def ask(text: str = "Hello", headers: dict[str, str] | None = None, **more: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}
        return promising.post("/v1/messages", body, headers=headers or {})

    own = ask(headers={"x-slo-gap-ms": "3000", "x-slo-ttft-ms": "30000"}, stream=True)
    assert (own.headers["x-slo-gap-ms"], own.headers["x-slo-ttft-ms"]) == ("3000", "30000")
    assert "x-slo-gap-ms" not in ask(service_tier="flex").headers
    refused = ask("word " * 6000, {"x-slo-ttft-ms": "1"})
    assert (refused.status_code, refused.json()["type"]) == (503, "error")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("overloaded_error", "deadline")
    assert error["predicted_ttft_ms"] > error["ttft_target_ms"]
    assert int(refused.headers["retry-after"]) >= 1


def test_an_impatient_client_changes_nobodys_latency(promising: RunningServer) -> None:
    """One that asks for a gap of 1 ms gets the least that the server grants, and the others' gaps stay as they were."""

    async def median_gap(client: httpx.AsyncClient, impatient: bool) -> float:
        async def read(headers: dict[str, str], times: list[float]) -> None:
            body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
            async with client.stream("POST", TEXT, json=body, headers=headers) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())

        others: list[list[float]] = [[] for _ in range(8)]
        greedy = {"x-slo-gap-ms": "1"} if impatient else {}
        await asyncio.gather(*(read({}, times) for times in others), read(greedy, []))
        return statistics.median(b - a for times in others for a, b in pairwise(times))

    async def scenario() -> list[tuple[float, float]]:
        async with httpx.AsyncClient(base_url=promising.url, timeout=60) as client:
            return [(await median_gap(client, False), await median_gap(client, True)) for _ in range(3)]

    found = asyncio.run(scenario())
    assert min(greedy / plain for plain, greedy in found) < 1.5  # a ratio within one run, the best of three


def test_metrics_have_both_names(promising: RunningServer) -> None:
    promising.post(TEXT, {"prompt": "The sea", "max_tokens": 5})
    text = promising.http.get("/metrics").text
    for name in ("weft_ttft_seconds_bucket", "vllm:time_to_first_token_seconds_bucket", "vllm:kv_cache_usage_perc"):
        assert name in text
    assert promising.metric('vllm:num_requests_running{engine="0",model_name="weft-default"}') == 0
    info = promising.get("/server_info")
    assert info["engine"]["gap_target"] == 2.0
    profile = info["engine"]["profile"]
    assert profile["kv_tokens"] == info["engine"]["num_blocks"] * info["engine"]["block_size"]
    assert profile["coefficients"]["token"] > 0
    json.dumps(info)


def test_command_lines_of_vllm_are_understood(guarded: RunningServer) -> None:
    assert guarded.get("/server_info")["engine"]["max_model_len"] == 4000
    assert "--trust-remote-code has no meaning here and is ignored" in guarded.log
    with pytest.raises(RuntimeError, match="2 is not supported here, only 1"):
        RunningServer("--tensor-parallel-size", "2")


def test_browsers_are_answered_where_they_may_ask(guarded: RunningServer) -> None:
    with httpx.Client(base_url=guarded.url) as client:
        ours = {"origin": "https://chat.example.org", "access-control-request-method": "POST"}
        preflight = client.options(TEXT, headers=ours)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert client.get("/health", headers=ours).headers["access-control-allow-origin"] == "https://chat.example.org"
        assert client.get("/health").headers["vary"] == "Origin", "what is cached without an origin is not for all"
        theirs = {"origin": "https://evil.example.org"}
        assert client.options(TEXT, headers=theirs).status_code == 401
        assert "access-control-allow-origin" not in client.get("/health", headers=theirs).headers


@pytest.mark.parametrize("origin", ["https://evil.example.org", "null", "http://127.0.0.1:1", "", "chrome://x", "*"])
def test_pages_of_other_origins_may_not_post(guarded: RunningServer, origin: str) -> None:
    """Also not as text, which browsers send without asking first, and whether there are keys or not."""
    for path in (TEXT, "/v1/chat/completions", "/tokenize", "/reset_prefix_cache"):
        for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
            headers = {"origin": origin, "content-type": kind}
            answer = guarded.http.post(path, content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
            assert answer.status_code == 403, (path, kind)
            error = answer.json()["error"]
            assert error["code"] == "origin_not_allowed"
            assert "--allowed-origins" in error["message"]
            assert repr(origin) in error["message"]
            assert "access-control-allow-origin" not in answer.headers


def test_pages_of_known_origins_and_programs_may_post(server: RunningServer, guarded: RunningServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    own = server.url.removeprefix("http://")
    for origin in (f"http://{own}", f"https://{own}", f"http://{own}".upper(), None):
        for kind in ("text/plain", "application/json", "application/x-www-form-urlencoded", None):
            given = {"origin": origin, "content-type": kind}
            headers = {name: value for name, value in given.items() if value is not None}
            assert server.http.post(TEXT, content=body, headers=headers).status_code == 200, (origin, kind)
    headers = {"origin": "https://chat.example.org", "content-type": "application/json"}
    assert guarded.http.post(TEXT, content=body, headers=headers).status_code == 200
    foreign = server.http.post(TEXT, content=body, headers={"origin": "https://evil.example.org"})
    assert foreign.status_code == 403, "also where there are no keys"
    assert server.http.get("/v1/models", headers={"origin": "https://evil.example.org"}).status_code == 200


def test_every_answer_has_an_id(guarded: RunningServer) -> None:
    given = guarded.post(TEXT, {"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"
    assert guarded.post(TEXT, {}).headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "prefix", "more"),
    [
        (TEXT, "cmpl-", {"prompt": "x"}),
        ("/v1/chat/completions", "chatcmpl-", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", "msg_", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", "embd-", {"input": "x"}),
    ],
)
def test_the_id_of_a_response_is_made_of_the_id_of_its_request(
    server: RunningServer, path: str, prefix: str, more: dict[str, object]
) -> None:
    body = more if prefix == "embd-" else {**more, "max_tokens": 1}
    answer = server.http.post(path, json=body)
    assert answer.json()["id"] == prefix + answer.headers["x-request-id"]
    twice = [server.http.post(path, json=body, headers={"x-request-id": 'my"own/id'}) for _ in range(2)]
    assert {again.headers["x-request-id"] for again in twice} == {'my"own/id'}
    ids = [again.json()["id"] for again in twice]
    assert len({*ids}) == 2
    assert all(id.startswith(f'{prefix}my"own/id-') for id in ids)


def test_the_id_of_a_stored_response_cannot_be_chosen(server: RunningServer) -> None:
    body = {"input": "x", "max_output_tokens": 1}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.json()["id"] == "resp_" + answer.headers["x-request-id"]
    own = server.http.post("/v1/responses", json=body, headers={"x-request-id": "a/b"}).json()["id"]
    assert re.fullmatch("resp_[0-9a-f]{24}", own)
    assert server.get(f"/v1/responses/{own}")["id"] == own


def test_refusals_do_not_fill_the_queue(tmp_path: Path) -> None:
    """A refused request waits no more, even where no step follows that would say so."""
    engine = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", "64MiB")
    store_calibration(tmp_path, *engine)
    promises = ("--gap-target-ms", "5000", "--ttft-target-ms", "60000")
    server = RunningServer(*engine, "--max-queued-requests", "2", *promises, XDG_CACHE_HOME=str(tmp_path))
    try:
        body = {"prompt": "Once", "max_tokens": 2}
        assert server.http.post(TEXT, json=body).status_code == 200
        codes = [server.http.post(TEXT, json=body, headers={"x-slo-ttft-ms": "0.001"}) for _ in range(8)]
        assert {answer.json()["error"]["code"] for answer in codes} == {"deadline"}
        assert server.http.get("/load").json()["sent"] == 0
        assert server.http.post(TEXT, json=body).status_code == 200
    finally:
        server.kill()
