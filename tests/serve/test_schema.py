"""schemathesis reads /openapi.json and sends what it allows, and what it does not: no crash, no hang, no 422."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings

from tests.serve.running import RunningServer
from tests.strength import examples

if TYPE_CHECKING:  # it takes a second to import, and only one process of several runs these tests
    import schemathesis
    from schemathesis.schemas import APIOperation

EXAMPLES = 30  # for each operation, of valid and of broken requests
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/v1/models",
    "/health",
)
PATHS += ("/metrics", "/ready", "/version", "/load", "/server_info", "/reset_prefix_cache", "/observe/frames")
COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_operation(server: RunningServer, path: str, mode: str) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations() if found.ok().path == path]
    if mode == "negative" and not any(operation.body for operation in operations):
        pytest.skip("nothing can be wrong with a request without a body")
    for operation in operations:
        try_out(operation, mode)


def try_out(operation: "APIOperation", mode: str) -> None:
    from schemathesis.generation import GenerationMode

    @settings(max_examples=examples(EXAMPLES), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def check(case: "schemathesis.Case") -> None:
        if isinstance(case.body, dict):  # a valid request may ask for all that the model can write: not in a test
            for name in COUNTS:
                count = case.body.get(name)
                if isinstance(count, int | float) and count > 8:  # JSON's integers may be written as 1024.0
                    case.body[name] = 8
            if "messages" in case.body and case.body.get("max_completion_tokens") is None:
                case.body["max_tokens"] = case.body.get("max_tokens") or 8
            if "input" in case.body:
                case.body["max_output_tokens"] = case.body.get("max_output_tokens") or 8
        answer = case.call(timeout=60)
        assert answer.status_code in (200, 400, 404, 405, 413, 503), answer.text
        if answer.status_code == 503:
            assert "retry-after" in answer.headers
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
            assert ("request_id" in answer.json()) == operation.path.startswith("/v1/messages")

    check()


def test_all_operations_are_named_here(server: RunningServer) -> None:
    assert set(server.get("/openapi.json")["paths"]) == {*PATHS, "/openapi.json"}
