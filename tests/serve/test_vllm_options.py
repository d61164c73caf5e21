"""Options of vLLM's command line, on one server that is given them all, over TLS."""

import json
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import RunningServer, eventually
from weft.errors import OptionError
from weft.llm import DEFAULT_MODEL
from weft.serve.options import ServeOptions

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
# Shows how it was given the content: as text, or as a list of parts.
TEMPLATE = "{% for m in messages %}{{ m.content if m.content is string else 'parts ' + m.content[0].text }}{% endfor %}"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


def certificate(folder: Path, *, password: str | None = None) -> tuple[str, str]:
    """A certificate that signs itself, for 127.0.0.1, and its key."""
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    cert, key = certificate(tmp_path_factory.mktemp("tls"))
    server = RunningServer(
        *("--model", str(DEFAULT_MODEL), "--served-model-name", "m", "--policy", "chunked", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", "64MiB", "--dtype", "float", "--max-logprobs", "3"),
        *("--return-tokens-as-token-ids", "--enable-force-include-usage", "--root-path", "/llm/"),
        *("--chat-template", TEMPLATE, "--chat-template-content-format", "openai"),
        *("--structured-outputs-config.backend", "guidance", "--structured_outputs_config.disable_fallback=true"),
        *("--ssl-certfile", cert, "--ssl-keyfile", key),
    )
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=server.url, verify=context, timeout=60) as http:
        yield http
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log
    assert "eof_received" not in server.log  # asyncio's complaint where TLS is asked for half a connection


def asked(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"max_tokens": 3, "temperature": 0, **body})
    answer.raise_for_status()
    return answer.json()


@needs_openssl
def test_tls_is_spoken_and_nothing_else(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    port = client.base_url.port
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{port}/health")


@needs_openssl
def test_a_stream_over_tls_ends_with_its_usage_unasked(client: httpx.Client) -> None:
    body = {"prompt": "The", "max_tokens": 4, "stream": True, "ignore_eos": True}
    with client.stream("POST", TEXT, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    last = json.loads(lines[-2])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert "usage" not in json.loads(lines[0])


@needs_openssl
def test_a_tls_client_that_goes_is_noticed(client: httpx.Client) -> None:
    body = {"prompt": "The", "max_tokens": 16000, "stream": True, "ignore_eos": True}
    with client.stream("POST", TEXT, json=body) as answer:
        next(answer.iter_lines())
    eventually(lambda: client.get("/load").json()["running"] == 0, 30)


@needs_openssl
def test_tokens_are_named_by_their_ids(client: httpx.Client) -> None:
    text = asked(client, TEXT, prompt="The", logprobs=2, return_token_ids=True)["choices"][0]
    named = [f"token_id:{token}" for token in text["token_ids"]]
    assert text["logprobs"]["tokens"] == named
    assert all(name in top for name, top in zip(named, text["logprobs"]["top_logprobs"], strict=True))
    messages = [{"role": "user", "content": "Hello"}]
    chat = asked(client, CHAT, messages=messages, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert all(found["token"].startswith("token_id:") for found in chat)
    include = ["message.output_text.logprobs"]
    response = client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 3, "include": include}).json()
    shown = response["output"][0]["content"][0]["logprobs"]
    assert shown
    assert all(found["token"].startswith("token_id:") for found in shown)


@needs_openssl
def test_a_request_may_ask_for_tokens_as_text(client: httpx.Client) -> None:
    text = asked(client, TEXT, prompt="The", logprobs=1, return_tokens_as_token_ids=False)["choices"][0]
    assert "".join(text["logprobs"]["tokens"]) == text["text"]


@needs_openssl
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (TEXT, {"prompt": "The", "logprobs": 4}, "logprobs"),
        (TEXT, {"prompt": "The", "prompt_logprobs": 4}, "prompt_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 4}, "top_logprobs"),
    ],
)
def test_more_logprobs_than_the_operator_allows(
    client: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    wanted = f"{field}: 4 alternatives a token are wanted, and 3 may be (--max-logprobs)"
    assert answer.json()["error"]["message"] == wanted
    assert answer.json()["error"]["param"] == field


@needs_openssl
def test_paths_are_served_with_the_root_path_and_without(client: httpx.Client) -> None:
    for prefix in ("", "/llm"):
        assert client.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "m"
        assert client.get(f"{prefix}/v1/models/m").json()["id"] == "m"
    assert client.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    for path in ("/llmx/v1/models", "/llm", "/llm/llm/v1/models"):
        assert client.get(path).status_code == 404


@needs_openssl
def test_the_template_is_given_parts(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    ids = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "parts Hello"


@needs_openssl
def test_the_options_are_told(client: httpx.Client) -> None:
    info = client.get("/server_info").json()
    assert info["engine_options"]["model"] == str(DEFAULT_MODEL)
    assert info["engine_options"]["dtype"] == "float32"
    assert info["server_options"]["root_path"] == "/llm"


def test_keys_are_asked_for_behind_the_root_path_too() -> None:
    server = RunningServer(
        *("--root-path", "/llm", "--api-key", "k", "--policy", "chunked", "--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", "16MiB"),
    )
    try:
        assert server.http.get("/llm/v1/models").status_code == 401
        assert server.http.get("/llm/health").status_code == 200
        assert server.http.get("/llm/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
    finally:
        server.kill()


@needs_openssl
def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    ServeOptions(ssl_certfile=cert, ssl_keyfile=key)
    with pytest.raises(OptionError, match=r"ssl_keyfile='.*' is of no use alone"):
        ServeOptions(ssl_keyfile=key)
    with pytest.raises(OptionError, match=r"ssl_certfile='/no/such.pem' is not a file"):
        ServeOptions(ssl_certfile="/no/such.pem", ssl_keyfile=key)
    with pytest.raises(OptionError, match=r"cannot be used .*PEM, without a password"):
        ServeOptions(ssl_certfile=key, ssl_keyfile=cert)
    with pytest.raises(OptionError, match="cannot be used"):  # the key is in another file
        ServeOptions(ssl_certfile=cert)
    (tmp_path / "secret").mkdir()
    locked = certificate(tmp_path / "secret", password="abcd")
    with pytest.raises(OptionError, match="cannot be used"):  # and nobody is asked for it
        ServeOptions(ssl_certfile=locked[0], ssl_keyfile=locked[1])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_logprobs", 21),
        ("max_logprobs", -1),
        ("root_path", "llm"),
        ("root_path", "/a//b"),
        ("root_path", "/a?b"),
        ("chat_template_content_format", "parts"),
    ],
)
def test_values_that_make_no_sense(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{option}="):
        ServeOptions(**{option: value})
