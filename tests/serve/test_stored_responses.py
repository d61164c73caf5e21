"""Responses by their ids, with the OpenAI SDK against a real server: continued, retrieved, cancelled, deleted."""

import json
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI

from tests.serve.running import RunningServer, eventually

MODEL = "weft-default"
ASK = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
# A structure keeps the model from ending early.
ENDLESS = {"type": "object", "properties": {"a": {"type": "string", "minLength": 50000}}, "required": ["a"]}
LONG = {
    "model": MODEL,
    "input": "Tell me everything.",
    "background": True,
    "max_output_tokens": 15000,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": ENDLESS}},
}
SMALL = ("--policy", "chunked", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "256MiB")


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    keys = ("--api-key", "alpha", "--api-key", "beta", "--max-concurrent-requests", "2")
    server = RunningServer(*SMALL, *keys)
    server.http.headers["authorization"] = "Bearer alpha"
    yield server
    server.kill()


@pytest.fixture(scope="module")
def forgetful() -> Iterator[RunningServer]:
    server = RunningServer(*SMALL, "--no-response-store")
    yield server
    server.kill()


def ended(client: OpenAI, id: str) -> openai.types.responses.Response:
    """The response, once it has ended."""
    eventually(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"), 60)
    return client.responses.retrieve(id)


def prompt_of(server: RunningServer, messages: list) -> int:
    return server.post("/tokenize", {"messages": messages}).json()["count"]


@pytest.mark.parametrize("stream", [False, True])
def test_retrieve_is_what_was_answered(client: OpenAI, stream: bool) -> None:
    if stream:
        events = list(client.responses.create(**ASK, input="A latte, please.", stream=True, metadata={"a": "b"}))
        answer = events[-1].response
    else:
        answer = client.responses.create(**ASK, input="A latte, please.", metadata={"a": "b"})
    assert answer.model_extra["store"] is True
    assert client.responses.retrieve(answer.id) == answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_by_its_id(client: OpenAI, server: RunningServer, stream: bool) -> None:
    """What the model sees is what it would see if all of it were sent again. Instructions are not carried over."""
    first = client.responses.create(**ASK, input="A latte, please.", instructions="Talk like a pirate.")
    second = {"input": [{"role": "user", "content": "And a tea."}], "previous_response_id": first.id}
    if stream:
        second_answer = list(client.responses.create(**ASK, **second, stream=True))[-1].response
    else:
        second_answer = client.responses.create(**ASK, **second)
    assert second_answer.previous_response_id == first.id
    third = client.responses.create(
        **ASK, input="Thanks.", previous_response_id=second_answer.id, instructions="Be kind."
    )
    talk = [
        {"role": "user", "content": "A latte, please."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And a tea."},
    ]
    assert second_answer.usage.input_tokens == prompt_of(server, talk)
    chat = client.chat.completions.create(model=MODEL, messages=talk, max_tokens=12, temperature=0)
    assert second_answer.output_text == chat.choices[0].message.content
    talk += [{"role": "assistant", "content": second_answer.output_text}, {"role": "user", "content": "Thanks."}]
    assert third.usage.input_tokens == prompt_of(server, [{"role": "system", "content": "Be kind."}, *talk])


def test_a_conversation_outlives_its_beginning(client: OpenAI) -> None:
    first = client.responses.create(**ASK, input="A latte, please.")
    second = client.responses.create(**ASK, input="And a tea.", previous_response_id=first.id)
    client.responses.delete(first.id)
    third = client.responses.create(**ASK, input="Thanks.", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens
    with pytest.raises(openai.NotFoundError) as found:
        client.responses.create(**ASK, input="And a tea.", previous_response_id=first.id)
    assert found.value.code == "previous_response_not_found"
    assert found.value.param == "previous_response_id"


def test_calls_of_tools_are_continued(client: OpenAI, server: RunningServer) -> None:
    tool = {
        "type": "function",
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    }
    wish = {"model": MODEL, "tools": [tool], "parallel_tool_calls": False, "max_output_tokens": 100}
    first = client.responses.create(**wish, input="Weather?", tool_choice="required")
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(**wish, input=[result], previous_response_id=first.id)
    sent = [{"role": "user", "content": "Weather?"}, call.model_dump(), result]
    whole = client.responses.input_tokens.count(model=MODEL, tools=[tool], input=sent)
    assert second.usage.input_tokens == whole.input_tokens


def test_log_probabilities_are_not_continued(client: OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    first = client.responses.create(**ASK, input="A latte, please.", include=include, top_logprobs=2)
    assert client.responses.retrieve(first.id).output[0].content[0].logprobs
    second = client.responses.create(**ASK, input="And a tea.", previous_response_id=first.id)
    items = client.responses.input_items.list(second.id, order="asc").data
    assert items[1].content[0].text == first.output_text
    assert not items[1].content[0].logprobs


def test_what_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    answer = client.responses.create(**ASK, input="A latte, please.", store=False)
    assert answer.model_extra["store"] is False
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(answer.id)
    with pytest.raises(openai.BadRequestError) as found:
        client.responses.create(**LONG, store=False)
    assert found.value.param == "background"


def test_delete(client: OpenAI, server: RunningServer) -> None:
    answer = client.responses.create(**ASK, input="A latte, please.")
    gone = server.http.delete(f"/v1/responses/{answer.id}")
    assert gone.json() == {"id": answer.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(answer.id)


def test_input_items(client: OpenAI) -> None:
    first = client.responses.create(**ASK, input="A latte, please.")
    second = client.responses.create(
        **ASK, input=[{"role": "user", "content": "And a tea."}], previous_response_id=first.id
    )
    page = client.responses.input_items.list(second.id, order="asc", limit=2)
    assert [item.content[0].text for item in page.data] == ["A latte, please.", first.output_text]
    assert page.has_more
    every = list(page)  # the SDK asks for the other pages
    assert [item.role for item in every] == ["user", "assistant", "user"]
    assert len({item.id for item in every}) == 3
    newest = client.responses.input_items.list(second.id).data
    assert [item.id for item in newest] == [item.id for item in reversed(every)]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(second.id, after="msg_x")
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(second.id, limit=1000)


def test_input_tokens(client: OpenAI, server: RunningServer) -> None:
    wish = {"model": MODEL, "input": "A latte, please.", "instructions": "Be kind."}
    counted = client.responses.input_tokens.count(**wish)
    answer = client.responses.create(**wish, max_output_tokens=2)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == answer.usage.input_tokens
    more = client.responses.input_tokens.count(model=MODEL, input="Thanks.", previous_response_id=answer.id)
    following = client.responses.create(
        model=MODEL, input="Thanks.", previous_response_id=answer.id, max_output_tokens=1
    )
    assert more.input_tokens == following.usage.input_tokens
    assert server.post("/v1/responses/input_tokens", {}).status_code == 400
    assert server.get("/load")["server_load"] == 0


def test_background(client: OpenAI) -> None:
    wish = {**ASK, "input": "A latte with oat milk, please.", "max_output_tokens": 40}
    begun = client.responses.create(**wish, background=True)
    assert begun.status in ("queued", "in_progress")
    assert begun.background is True
    answer = ended(client, begun.id)
    plain = client.responses.create(**wish)
    assert (answer.status, answer.output_text) == (plain.status, plain.output_text)
    assert answer.usage.output_tokens == plain.usage.output_tokens
    following = client.responses.create(**ASK, input="And a tea.", previous_response_id=answer.id)
    assert following.usage.input_tokens > answer.usage.input_tokens
    assert client.responses.cancel(answer.id).status == plain.status, "what has ended stays as it is"


def test_a_background_response_is_not_continued_before_it_has_ended(client: OpenAI) -> None:
    begun = client.responses.create(**LONG)
    with pytest.raises(openai.BadRequestError) as found:
        client.responses.create(**ASK, input="And?", previous_response_id=begun.id)
    assert found.value.param == "previous_response_id"
    client.responses.cancel(begun.id)


def test_cancel(client: OpenAI, server: RunningServer) -> None:
    begun = client.responses.create(**LONG)
    eventually(lambda: client.responses.retrieve(begun.id).status == "in_progress", 30)
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    server.wait_until_idle()
    assert server.get("/load")["server_load"] == 0
    plain = client.responses.create(**ASK, input="A latte, please.")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(plain.id)


def test_deleting_one_that_runs_ends_it(client: OpenAI, server: RunningServer) -> None:
    begun = client.responses.create(**LONG)
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)
    server.wait_until_idle()


def test_a_background_stream_is_read_on_after_its_client_has_left(client: OpenAI, server: RunningServer) -> None:
    wish = {**ASK, "input": "A latte with oat milk, please.", "max_output_tokens": 60}
    plain = client.responses.create(**wish)
    read = []
    with client.responses.create(**wish, background=True, stream=True) as stream:
        for event in stream:
            read.append(event)
            if len(read) == 6:
                break
    assert [event.type for event in read[:3]] == ["response.created", "response.queued", "response.in_progress"]
    id = read[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=read[-1].sequence_number))
    every = [*read, *rest]
    assert [event.sequence_number for event in every] == list(range(len(every)))
    text = "".join(event.delta for event in every if event.type == "response.output_text.delta")
    assert text == plain.output_text == every[-1].response.output_text
    again = list(client.responses.retrieve(id, stream=True))
    assert again == every, "also when it has ended"
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(plain.id, stream=True)
    server.wait_until_idle()


def test_a_cancelled_stream_says_so(client: OpenAI) -> None:
    stream = client.responses.create(**LONG, stream=True)
    events = iter(stream)
    first = next(events)
    for _ in range(5):
        next(events)
    cancelled = client.responses.cancel(first.response.id)
    *_, last = events
    assert cancelled.status == last.response.status == "cancelled"
    assert last.type == "response.failed"


def test_another_key_finds_nothing(keyed: RunningServer) -> None:
    own = keyed.post("/v1/responses", {"input": "A latte.", "max_output_tokens": 2}).json()["id"]
    running = keyed.post("/v1/responses", LONG).json()["id"]
    beta = {"authorization": "Bearer beta"}
    for id in (own, running):
        path = f"/v1/responses/{id}"
        answers = [
            keyed.http.get(path, headers=beta),
            keyed.http.get(f"{path}?stream=true", headers=beta),
            keyed.http.get(f"{path}/input_items", headers=beta),
            keyed.http.delete(path, headers=beta),
            keyed.http.post(f"{path}/cancel", headers=beta),
            keyed.post("/v1/responses", {"input": "And?", "previous_response_id": id}, headers=beta),
            keyed.post("/v1/responses/input_tokens", {"input": "And?", "previous_response_id": id}, headers=beta),
        ]
        assert [answer.status_code for answer in answers] == [404] * 7
        unknown = keyed.http.get(f"/v1/responses/resp_{'0' * 24}", headers=beta).json()["error"]
        assert answers[0].json()["error"] == {**unknown, "message": unknown["message"].replace("resp_" + "0" * 24, id)}
        assert keyed.http.get(path).status_code == 200, "it is still there"
        with httpx.Client(base_url=keyed.url) as nobody:
            assert nobody.get(path).status_code == 401
    assert keyed.post(f"/v1/responses/{running}/cancel", None).json()["status"] == "cancelled"


def test_background_responses_count_for_the_limits_of_a_key(keyed: RunningServer) -> None:
    running = [keyed.post("/v1/responses", LONG).json()["id"] for _ in range(2)]
    refused = keyed.post("/v1/responses", LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency")
    beta = keyed.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"authorization": "Bearer beta"})
    assert beta.status_code == 200
    for id in running:
        assert keyed.http.post(f"/v1/responses/{id}/cancel").status_code == 200
    assert keyed.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_the_store_can_be_switched_off(forgetful: RunningServer) -> None:
    answer = forgetful.post("/v1/responses", {"input": "A latte.", "max_output_tokens": 2}).json()
    assert answer["store"] is False
    found = forgetful.http.get(f"/v1/responses/{answer['id']}")
    assert found.status_code == 404
    assert "--no-response-store" in found.json()["error"]["message"]
    for field, value in (("previous_response_id", answer["id"]), ("background", True)):
        refused = forgetful.post("/v1/responses", {"input": "And?", field: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert "--no-response-store" in refused.json()["error"]["message"]


def test_background_responses_wait_in_the_queue_and_fail_with_the_engine() -> None:
    """The failure is told in the response's error."""
    server = RunningServer(*SMALL, "--max-queued-requests", "3", "--shutdown-timeout", "1")
    try:
        every = []
        eventually(lambda: every.append(server.post("/v1/responses", LONG)) or every[-1].status_code == 503, 30)
        assert every[-1].json()["error"]["code"] == "queue_full"
        ids = [answer.json()["id"] for answer in every if answer.status_code == 200]
        assert len(ids) >= 3
        streamed = server.http.get(f"/v1/responses/{ids[0]}?stream=true")
        assert streamed.status_code == 400
        assert server.engine_pid is not None
        os.kill(server.engine_pid, signal.SIGKILL)
        for id in ids:
            eventually(lambda id=id: server.get(f"/v1/responses/{id}")["status"] == "failed", 30)
            assert server.get(f"/v1/responses/{id}")["error"]["code"] in ("server_error", "rate_limit_exceeded")
        assert any("engine process died" in server.get(f"/v1/responses/{id}")["error"]["message"] for id in ids)
        assert server.get("/load")["server_load"] == 0
    finally:
        server.kill()


def test_a_background_response_has_its_time_at_shutdown() -> None:
    server = RunningServer(*SMALL, "--shutdown-timeout", "60")
    try:
        body = {"input": "Hello", "background": True, "stream": True, "max_output_tokens": 300}
        found: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        found.append(line[6:])
                        begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(30)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.http.get("/ready").status_code == 503, 10)
        refused = server.post("/v1/responses", LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        thread.join(60)
        assert json.loads(found[-1])["response"]["status"] in ("completed", "incomplete")
        assert server.process.wait(20) == 0
    finally:
        server.kill()


@pytest.mark.parametrize(
    "query", ["stream=true&starting_after=x", "stream=true&starting_after=-1", "&".join(["a=1"] * 99)]
)
def test_queries_that_make_no_sense(client: OpenAI, server: RunningServer, query: str) -> None:
    answer = client.responses.create(**ASK, input="A latte, please.")
    assert server.http.get(f"/v1/responses/{answer.id}?{query}").status_code == 400


def test_thoughts_are_counted() -> None:
    """With a parser for which a reply begins inside the tags: all of it is a thought here."""
    server = RunningServer(*SMALL, "--reasoning-parser", "deepseek_r1")
    try:
        answer = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 9, "temperature": 0}).json()
        usage = answer["usage"]
        assert answer["output"][0]["type"] == "reasoning"
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]
    finally:
        server.kill()
