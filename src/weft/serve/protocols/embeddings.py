"""/v1/embeddings, /v1/score and /v1/rerank: the answer is computed from pooled hidden states of the prompts.

Such a request is prefill only. The scheduler treats it like any other request, with the same TTFT target: the embedding
is ready when the first token would be. Scores are cosines of embeddings: this server has no cross-encoders.
"""

import base64
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from msgspec import Raw, Struct

from weft.engine.pooling import Vector, finished
from weft.errors import RequestError
from weft.serve.engines.request_output_collector import SequenceUpdate
from weft.serve.output.choice import NO_CALLS, Choice, ChoiceDelta
from weft.serve.protocols.formatter import to_json
from weft.serve.protocols.openai_bodies import CompletionBody, Count, Json, Whole

Vectors = list[Vector]


class PoolingBody(Struct, kw_only=True):
    """Fields that the bodies of all three endpoints have."""

    field: ClassVar[str]  # name of the field with the prompts, for error messages

    model: str | None = None
    user: str | None = None
    priority: Whole | None = None
    service_tier: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] | None = None

    def prompts(self) -> str | list[Any]:
        raise NotImplementedError

    def formatter(self, id: str, model: str) -> "EmbeddingsFormatter":
        raise NotImplementedError

    def completion(self) -> CompletionBody:
        """The same prompts as a completion body with max_tokens=1."""
        same = ("model", "user", "priority", "service_tier", "cache_salt", "truncate_prompt_tokens", "truncation_side")
        add_special_tokens = getattr(self, "add_special_tokens", None)
        given = {name: getattr(self, name) for name in same}
        return CompletionBody(prompt=self.prompts(), max_tokens=1, add_special_tokens=add_special_tokens, **given)


class EmbeddingsBody(PoolingBody, kw_only=True):
    field = "input"
    input: str | list[Any]  # text, token ids, or a list of either
    encoding_format: str | None = None  # float or base64
    dimensions: Count | None = None  # return only the first so many numbers
    normalize: bool | None = None  # scale to length one; default true
    add_special_tokens: bool | None = None

    def prompts(self) -> str | list[Any]:
        return self.input

    def formatter(self, id: str, model: str) -> "EmbeddingsFormatter":
        if self.encoding_format not in (None, "float", "base64"):
            raise RequestError(f"encoding_format={self.encoding_format!r:.40} is unknown: choose float or base64")
        return EmbeddingsFormatter(id, model, self)


class ScoreBody(PoolingBody, kw_only=True):
    field = "text_2"
    text_1: str | list[str]
    text_2: str | list[str]

    def prompts(self) -> list[Any]:
        first, second = self.pairs()
        return [*first, *second]

    def pairs(self) -> tuple[list[str], list[str]]:
        """Texts of both sides. A single text_1 is compared with each text_2."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if not first or not second or len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: give one text_1, or as many as text_2 has"
            )
        return first, second

    def formatter(self, id: str, model: str) -> "EmbeddingsFormatter":
        return ScoreFormatter(id, model, self)


class RerankBody(PoolingBody, kw_only=True):
    field = "documents"
    query: str
    documents: list[str | Json]
    top_n: Count | None = None  # return only the best so many; 0 or null: all
    return_documents: bool | None = None

    def prompts(self) -> list[Any]:
        return [self.query, *self.texts()]

    def texts(self) -> list[str]:
        found = [one.get("text") if isinstance(one, dict) else one for one in self.documents]
        texts = [text for text in found if isinstance(text, str)]
        if not texts or len(texts) < len(found):
            raise RequestError('documents must be texts or objects like {"text": ...}, at least one')
        return texts

    def formatter(self, id: str, model: str) -> "EmbeddingsFormatter":
        return RerankFormatter(id, model, self)


class EmbeddingChoice(Choice):
    """A prompt's place in the answer, and its embedding once the request has ended."""

    embedding: bytes | None = None

    def append(self, update: SequenceUpdate) -> ChoiceDelta:
        if update.end is not None:
            self.finish_reason, self.embedding = update.end.reason, update.embedding
        return ChoiceDelta("", "", NO_CALLS, None, None, self.finish_reason)

    def vector(self, dimensions: int | None = None, normalize: bool = True) -> Vector:
        assert self.embedding is not None, "the engine sends it with the end"
        return finished(np.frombuffer(self.embedding, np.float32), dimensions, normalize)


class EmbeddingsFormatter:
    """Formats a list of vectors. Never streamed."""

    done = b""
    token_ids = False

    def __init__(self, id: str, model: str, body: Any) -> None:
        self.id, self.model, self.body = id, model, body
        self.created = int(time.time())

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        body: EmbeddingsBody = self.body
        shown = []
        for choice in choices:
            assert isinstance(choice, EmbeddingChoice)
            vector = choice.vector(body.dimensions or None, body.normalize is not False)
            as_text = body.encoding_format == "base64"
            value = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()
            # Encoded one by one, because the encoder holds the GIL.
            shown.append(Raw(to_json({"object": "embedding", "index": choice.index, "embedding": value})))
        return self._answer("list", {"data": shown}, extras)

    def _answer(self, kind: str, content: Json, extras: Json) -> Json:
        tokens = extras["usage"]["prompt_tokens"]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, **content, "usage": usage, "metrics": extras.get("metrics")}

    def first_chunk(self, choice: Choice, extras: Json) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def last_chunk(self, extras: Json) -> bytes:
        raise NotImplementedError("embeddings are not streamed")

    def error_chunk(self, body: Json) -> bytes:
        raise NotImplementedError("embeddings are not streamed")


class ScoreFormatter(EmbeddingsFormatter):
    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        body: ScoreBody = self.body
        vectors = _vectors(choices)
        number = len(body.pairs()[0])
        first, second = vectors[:number], vectors[number:]
        pairs = zip(first * (len(second) // number), second, strict=True)
        shown = [
            {"index": index, "object": "score", "score": float(left @ right)}
            for index, (left, right) in enumerate(pairs)
        ]
        return self._answer("list", {"data": shown}, extras)


class RerankFormatter(EmbeddingsFormatter):
    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        body: RerankBody = self.body
        query, *documents = _vectors(choices)
        scores = [float(query @ document) for document in documents]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        texts = body.texts()
        shown: list[Json] = [{"index": index, "relevance_score": scores[index]} for index in best]
        if body.return_documents is not False:
            shown = [{**one, "document": {"text": texts[one["index"]]}} for one in shown]
        return self._answer("rerank", {"results": shown}, extras)


def _vectors(choices: Sequence[Choice]) -> Vectors:
    return [choice.vector() for choice in choices if isinstance(choice, EmbeddingChoice)]
