"""Answer formats of chat completions and text completions, as stream frames and as full_response bodies.

A frame of plain text is built from constant bytes and the text of the token. Only rare frames (log probabilities, tool
calls, the last chunk) go through the JSON encoder as a full_response.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from weft.engine.executor import TokenLogprobs
from weft.serve.output.choice import Choice, ChoiceDelta
from weft.serve.output.token_offsets import TokenOffsets
from weft.text.tokenizer import Tokenizer
from weft.text.tools import ToolCallDelta

Json = dict[str, Any]
to_json = msgspec.json.Encoder().encode


def continues_call(call: ToolCallDelta) -> bool:
    """Whether a message continues a tool call, and does not start one."""
    return call.id is None


def sse_frame(data: Json) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


class Formatter(Protocol):
    """Formats the answer to one request."""

    id: str
    done: bytes  # the end of a stream
    token_ids: bool  # whether every token gets a frame, even if it adds no text

    def first_chunk(self, choice: Choice, extras: Json) -> bytes:
        """The frames before a choice's first delta. `extras` is as in `delta`."""
        ...

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        """The frame of a delta. `extras` are fields next to `choices`, such as usage."""
        ...

    def last_chunk(self, extras: Json) -> bytes:
        """The last frame, without choices."""
        ...

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        """The body of a non-streamed answer."""
        ...

    def error_chunk(self, body: Json) -> bytes:
        """A frame with an error."""
        ...


class _OpenAIFormatter:
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

    def _slow(self, shown: Json, extras: Json) -> bytes:
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


class ChatFormatter(_OpenAIFormatter):
    kind = "chat.completion.chunk"

    def __init__(
        self,
        id: str,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        logprobs: bool,
        token_ids: bool,
        tokens_as_ids: bool = False,
        fingerprint: str | None = None,
        prompt: Sequence[int],
        prompt_logprobs: bool,
        reasoning: bool = True,
        legacy: bool = False,
    ) -> None:
        super().__init__(
            id, model, tokenizer, token_ids=token_ids, tokens_as_ids=tokens_as_ids, fingerprint=fingerprint
        )
        self.logprobs = logprobs
        self.prompt = prompt
        self.prompt_logprobs = prompt_logprobs
        self.reasoning = reasoning  # whether the answer has the reasoning
        self.legacy = legacy  # shows a tool call as function_call
        self._is_plain = not (logprobs or token_ids)

    def first_chunk(self, choice: Choice, extras: Json) -> bytes:
        shown = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._slow(shown, {**self._about_prompt(choice), **extras})

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        text, reasoning, calls, reason = delta.text, delta.reasoning, delta.calls, delta.reason
        if self._is_plain and not (extras or reason or reasoning or calls):
            return b"%s%d%s%s%s" % (self._head, choice.index, _CHAT_TEXT, to_json(text), _CHAT_END)
        message: Json = {}
        if reasoning and self.reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning  # older name, and vLLM's newer one
        if text:
            message["content"] = text
        if calls and self.legacy:
            message["function_call"] = _call(0, None, calls[0].name, "".join(call.arguments for call in calls))[
                "function"
            ]
        elif calls:
            message["tool_calls"] = [_call(call.index, call.id, call.name, call.arguments) for call in calls]
        finish = None if reason is None else self._finish(choice)
        shown: Json = {"index": choice.index, "delta": message, "logprobs": None, "finish_reason": finish}
        if self.logprobs and delta.logprobs is not None:
            shown["logprobs"] = {"content": [self._logprob(delta.logprobs)], "refusal": None}
        if reason is not None and choice.stop_reason is not None:
            shown["stop_reason"] = choice.stop_reason
        if self.token_ids:
            shown["token_ids"] = [] if delta.token is None else [delta.token]
        return self._slow(shown, extras)

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        about = self._about_prompt(choices[0])
        shown = [self._choice(choice) for choice in choices]
        return {**self._envelope("chat.completion"), "choices": shown, **about, **extras}

    def _choice(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reasoning and self.reasoning:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            if self.legacy:
                message["function_call"] = choice.calls[0]["function"]
            else:
                message["tool_calls"] = choice.calls
        logprobs = None
        if self.logprobs:
            logprobs = {"content": [self._logprob(found) for found in choice.logprobs], "refusal": None}
        shown: Json = {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish(choice),
            "stop_reason": choice.stop_reason,
        }
        return {**shown, "token_ids": choice.tokens} if self.token_ids else shown

    def _finish(self, choice: Choice) -> str | None:
        if self.legacy and choice.calls and choice.reason in ("stop", "tool_calls"):
            return "function_call"
        return choice.reason

    def _about_prompt(self, choice: Choice) -> Json:
        about: Json = {}
        if self.token_ids:
            about["prompt_token_ids"] = list(self.prompt)
        if self.prompt_logprobs and choice.index == 0:
            about["prompt_logprobs"] = self._all_prompt_logprobs(choice, len(self.prompt))
        return about

    def _logprob(self, found: TokenLogprobs) -> Json:
        return spelled_logprob(self.tokenizer, found, self.tokens_as_ids)


def spelled_logprob(tokenizer: Tokenizer | None, found: TokenLogprobs, tokens_as_ids: bool = False) -> Json:
    """A token and its most likely alternatives, in the format of chat completions."""

    def entry(token: int, logprob: float) -> Json:
        spelled = tokenizer.token_bytes(token) if tokenizer is not None else b""
        name = token_name(None if tokens_as_ids else tokenizer, token)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(spelled)}

    top = [entry(token, logprob) for token, logprob in found.top.items()]
    return {**entry(found.token, found.logprob), "top_logprobs": top}


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token's text; without a tokenizer, its id in vLLM's notation."""
    return tokenizer.token_text(token) if tokenizer is not None else f"token_id:{token}"


_CHAT_TEXT = b',"delta":{"content":'
_CHAT_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _call(index: int, id: str | None, name: str | None, arguments: str) -> Json:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    if id is None:
        return {"index": index, "function": function}
    return {"index": index, "id": id, "type": "function", "function": function}


class CompletionFormatter(_OpenAIFormatter):
    kind = "text_completion"

    def __init__(
        self,
        id: str,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        logprobs: int | None,
        token_ids: bool,
        tokens_as_ids: bool = False,
        fingerprint: str | None = None,
        prompts: Sequence[tuple[Sequence[int], str]],
        per_prompt: int,
        echo: bool,
        prompt_logprobs: bool,
        keeps: int | None = None,
        generates: bool = True,
    ) -> None:
        """`prompts` are pairs of ids and text. Each has `per_prompt` choices; the `keeps` most likely are shown."""
        super().__init__(
            id, model, tokenizer, token_ids=token_ids, tokens_as_ids=tokens_as_ids, fingerprint=fingerprint
        )
        self.logprobs = logprobs
        self.prompts = prompts
        self.per_prompt = per_prompt
        self.echo = echo
        self.prompt_logprobs = prompt_logprobs
        self.keeps = keeps or per_prompt
        self.generates = generates  # False: max_tokens=0, so that the sampled token is not shown
        self._is_plain = logprobs is None
        self._streamed: dict[int, int] = {}  # characters streamed so far, by choice
        self._waiting: dict[int, list[tuple[int, TokenLogprobs]]] = {}  # logprobs by offset, until its text is streamed

    def first_chunk(self, choice: Choice, extras: Json) -> bytes:
        if not (self.echo or self.token_ids or self.prompt_logprobs):
            return b""
        ids, text = self.prompts[choice.index // self.per_prompt]
        shown: Json = {"index": choice.index, "text": text if self.echo else "", "finish_reason": None}
        shown["logprobs"] = None
        if self._describes_prompt:
            shown["logprobs"] = self._lists(self._of_prompt(choice, ids), self._prompt_offsets(ids))
        if self.token_ids:
            shown.update(prompt_token_ids=list(ids), token_ids=[])
        if self.prompt_logprobs:
            shown["prompt_logprobs"] = self._all_prompt_logprobs(choice, len(ids))
        return self._slow(shown, self._billed(extras))

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        if self._is_plain and not (extras or delta.reason):
            end = _TEXT_END if not self.token_ids else _TEXT_END_WITH_ID % delta.token
            return b"%s%d%s%s%s" % (self._head, choice.index, _TEXT, to_json(delta.text), end)
        text = delta.text if self.generates else ""
        shown: Json = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": delta.reason}
        if self.logprobs is not None and self.generates:
            shown["logprobs"] = self._due(choice, delta)
            if not (text or shown["logprobs"] or delta.reason or self.token_ids):
                return b""
        if delta.reason is not None:
            shown["stop_reason"] = choice.stop_reason
        if self.token_ids:
            shown["token_ids"] = [] if delta.token is None or not self.generates else [delta.token]
        return self._slow(shown, self._billed(extras))

    def _due(self, choice: Choice, delta: ChoiceDelta) -> Json | None:
        """The log probabilities to send with a delta.

        Tokens in withheld text must wait, because a stop string may still remove that text.
        """
        waiting = self._waiting.setdefault(choice.index, [])
        if delta.logprobs is not None:
            waiting.append((delta.offset, delta.logprobs))
        length = self._streamed[choice.index] = self._streamed.get(choice.index, 0) + len(delta.text)
        everything = delta.reason is not None or self.tokenizer is None
        due = [one for one in waiting if everything or one[0] < length]
        if not due:
            return None
        del waiting[: len(due)]  # correct because offsets only grow
        return self._lists([found for _, found in due], self._shifted(choice, (at for at, _ in due), length))

    def last_chunk(self, extras: Json) -> bytes:
        return super().last_chunk(self._billed(extras))

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        shown: list[msgspec.Raw] = []
        for start in range(0, len(choices), self.per_prompt):
            group = list(choices[start : start + self.per_prompt])
            if self.keeps < self.per_prompt:
                group = sorted(group, key=_likelihood, reverse=True)[: self.keeps]
            # Encoded one by one, because the encoder holds the GIL.
            shown += [
                msgspec.Raw(to_json(self._choice(choice, len(shown) + place))) for place, choice in enumerate(group)
            ]
        return {**self._envelope("text_completion"), "choices": shown, **self._billed(extras)}

    def _billed(self, extras: Json) -> Json:
        """With max_tokens=0, usage does not count the one token that the engine always samples."""
        if self.generates or "usage" not in extras:
            return extras
        usage = extras["usage"]
        return {**extras, "usage": {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}}

    @property
    def _describes_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    def _choice(self, choice: Choice, index: int) -> Json:
        ids, prompt = self.prompts[choice.index // self.per_prompt]
        text = choice.text if self.generates else ""
        lists = None
        if self.logprobs is not None:
            found: list[TokenLogprobs | int] = self._of_prompt(choice, ids) if self.echo else []
            offsets = self._prompt_offsets(ids) if self.echo else []
            if self.generates:
                found += choice.logprobs
                offsets += self._shifted(choice, choice.offsets, len(text))
            lists = self._lists(found, offsets)
        shown: Json = {
            "index": index,
            "text": prompt + text if self.echo else text,
            "logprobs": lists,
            "finish_reason": choice.reason,
            "stop_reason": choice.stop_reason,
        }
        if self.prompt_logprobs:
            shown["prompt_logprobs"] = self._all_prompt_logprobs(choice, len(ids))
        if self.token_ids:
            shown.update(prompt_token_ids=list(ids), token_ids=choice.tokens if self.generates else [])
        return shown

    def _of_prompt(self, choice: Choice, ids: Sequence[int]) -> list[TokenLogprobs | int]:
        """Log probabilities of each prompt token, or the token id if there are none, as for the first token."""
        return [choice.prompt_logprobs.get(position, token) for position, token in enumerate(ids)]

    def _prompt_offsets(self, ids: Sequence[int]) -> list[int]:
        """Character offsets at which the prompt's tokens start."""
        if self.tokenizer is None:
            return [0] * len(ids)
        ruler = TokenOffsets(self.tokenizer)
        return [ruler.push(token)[0] for token in ids]

    def _shifted(self, choice: Choice, offsets: Iterable[int], length: int) -> list[int]:
        """Offsets in the returned text, with the prompt if echoed. `length` is the length of the completion so far."""
        start = len(self.prompts[choice.index // self.per_prompt][1]) if self.echo else 0
        return [start + min(offset, length) for offset in offsets]

    def _lists(self, found: Sequence[TokenLogprobs | int], offsets: list[int]) -> Json:
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for one in found:
            token = one if isinstance(one, int) else one.token
            name = self._name(token)
            tokens.append(name)
            logprobs.append(None if isinstance(one, int) else _finite(one.logprob))
            if isinstance(one, int):
                tops.append(None)
            else:
                named = {self._name(token): _finite(logprob) for token, logprob in one.top.items()}
                tops.append(named | {name: _finite(one.logprob)})
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


_TEXT = b',"text":'
_TEXT_END = b',"logprobs":null,"finish_reason":null}]}\n\n'
_TEXT_END_WITH_ID = b',"logprobs":null,"finish_reason":null,"token_ids":[%d]}]}\n\n'


def _likelihood(choice: Choice) -> float:
    """Mean log probability of the choice's tokens."""
    return sum(found.logprob for found in choice.logprobs) / max(1, len(choice.logprobs))


def _finite(logprob: float) -> float:
    """At least -9999, which other servers send for an impossible token too. JSON has no infinity."""
    return max(logprob, -9999.0)
