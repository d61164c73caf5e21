"""OpenAIFormatter: what the answer formats of chats and text completions have in common.

A chunk of plain text is built from constant bytes and the text of the token. Only rare chunks (log probabilities, tool
calls, the last chunk) go through the JSON encoder as a whole.
"""

import time

from weft.engine.executor import TokenLogprobs
from weft.serve.output.choice import Choice
from weft.serve.protocols.formatter import Json, sse_frame, to_json
from weft.serve.protocols.logprobs import token_name
from weft.text.tokenizer import Tokenizer


class OpenAIFormatter:
    kind: str  # the `object` field of a chunk
    done = b"data: [DONE]\n\n"

    def __init__(
        self,
        id: str,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        token_ids: bool,
        tokens_as_ids: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        """With `tokens_as_ids`, log probabilities name tokens by id."""
        self.id = id
        self.model = model
        self.tokenizer = tokenizer
        self.token_ids = token_ids
        self.fingerprint = fingerprint  # of the model, the options and weft's version
        self.tokens_as_ids = tokens_as_ids
        self.created = int(time.time())
        self._head = b"data: " + to_json(self._envelope(self.kind))[:-1] + b',"choices":[{"index":'

    def last_chunk(self, extras: Json) -> bytes:
        return sse_frame({**self._envelope(self.kind), "choices": [], **extras})

    def error_chunk(self, body: Json) -> bytes:
        return sse_frame(body)

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _encoded_chunk(self, shown: Json, extras: Json) -> bytes:
        return sse_frame({**self._envelope(self.kind), "choices": [shown], **extras})

    def _name(self, token: int) -> str:
        return token_name(None if self.tokens_as_ids else self.tokenizer, token)

    def _all_prompt_logprobs(self, choice: Choice, length: int) -> list[Json | None]:
        """Prompt logprobs in vLLM's format: one object per position, by token id. The first token has None."""
        every = [choice.prompt_logprobs.get(position) for position in range(length)]
        return [None if found is None else self._by_id(found) for found in every]

    def _by_id(self, found: TokenLogprobs) -> Json:
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(found.top.items(), start=1)}
        ranked[found.token] = (found.logprob, found.rank)
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": token_name(self.tokenizer, token)}
            for token, (logprob, rank) in ranked.items()
        }
