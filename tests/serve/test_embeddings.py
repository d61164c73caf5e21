"""Embeddings, scores and rankings over HTTP."""

import base64
from typing import Any

import numpy as np
import pytest

from tests.serve.running import RunningServer

PATH = "/v1/embeddings"
TEXTS = ["The old house by the sea.", "A latte with oat milk, please.", "The ship came home at noon."]


def vectors(server: RunningServer, **body: Any) -> list[Any]:
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def test_an_embedding(server: RunningServer) -> None:
    answer = server.post(PATH, {"input": TEXTS[0]}).json()
    assert answer["object"] == "list"
    (only,) = answer["data"]
    assert (only["object"], only["index"]) == ("embedding", 0)
    assert np.linalg.norm(only["embedding"]) == pytest.approx(1.0, abs=1e-5)
    tokens = server.post("/tokenize", {"prompt": TEXTS[0]}).json()
    assert answer["usage"] == {"prompt_tokens": tokens["count"], "total_tokens": tokens["count"]}
    (by_ids,) = vectors(server, input=tokens["tokens"])
    assert by_ids == pytest.approx(only["embedding"], abs=1e-4)


def test_several_inputs_keep_their_order(server: RunningServer) -> None:
    together = vectors(server, input=TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        (alone,) = vectors(server, input=text)
        assert alone == pytest.approx(vector, abs=1e-3)


def test_forms(server: RunningServer) -> None:
    (plain,) = vectors(server, input=TEXTS[0])
    (coded,) = vectors(server, input=TEXTS[0], encoding_format="base64")
    assert np.frombuffer(base64.b64decode(coded), "<f4") == pytest.approx(plain, abs=1e-4)
    (raw,) = vectors(server, input=TEXTS[0], normalize=False)
    assert np.linalg.norm(raw) != pytest.approx(1.0, abs=0.01)
    (short,) = vectors(server, input=TEXTS[0], dimensions=8)
    assert short == pytest.approx(np.array(raw[:8]) / np.linalg.norm(raw[:8]), abs=1e-3)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": []}, "empty"),
        ({"input": ""}, "empty"),
        ({"input": "a", "dimensions": 100_000}, "dimensions=100000"),
        ({"input": "a", "encoding_format": "hex"}, "hex"),
        ({"input": [[10**6]]}, "1000000"),
        ({"input": ["a"] * 1025}, "1025"),
        ({}, "input"),
    ],
)
def test_wrong_requests(server: RunningServer, body: dict[str, Any], said: str) -> None:
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_what_other_paths_know_and_what_they_do_not(server: RunningServer) -> None:
    ids = list(range(10, 40))
    (left,) = vectors(server, input=ids, truncate_prompt_tokens=5)
    (right,) = vectors(server, input=ids, truncate_prompt_tokens=5, truncation_side="right")
    assert left == pytest.approx(vectors(server, input=ids[-5:])[0], abs=1e-3)
    assert right == pytest.approx(vectors(server, input=ids[:5])[0], abs=1e-3)
    assert server.post("/embeddings", {"input": "a"}).status_code == 200
    wrong = server.post("/v1/rerank", {"query": "a", "documents": [""]})
    assert wrong.json()["error"]["param"] == "documents"


def test_scores_are_cosines(server: RunningServer) -> None:
    first, *others = vectors(server, input=TEXTS)
    cosines = [float(np.dot(first, other)) for other in others]
    answer = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(cosines, abs=1e-3)
    same = server.post("/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS[:2]}).json()["data"]
    assert [one["score"] for one in same] == pytest.approx([1.0, 1.0], abs=1e-3)
    wrong = server.post("/score", {"text_1": TEXTS[:2], "text_2": TEXTS})
    assert wrong.status_code == 400
    assert "text_1 has 2" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_by_their_score(server: RunningServer, path: str) -> None:
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]], "top_n": 2}
    results = server.post(path, body).json()["results"]
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-3)
    assert results[0]["document"] == {"text": TEXTS[0]}
    assert len(results) == 2
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    bare = server.post(path, {**body, "return_documents": False}).json()["results"]
    assert "document" not in bare[0]
    wrong = server.post(path, {**body, "documents": [7]})
    assert wrong.status_code == 400


def test_the_openai_client_reads_them(server: RunningServer) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    found = client.embeddings.create(model=model, input=TEXTS)  # it asks for base64
    assert len(found.data) == len(TEXTS)
    assert found.data[0].embedding == pytest.approx(vectors(server, input=TEXTS)[0], abs=1e-3)
