"""ChatFormatter: the answer format of /v1/chat/completions."""

from collections.abc import Sequence

from weft.engine.executor import TokenLogprobs
from weft.serve.output.choice import Choice, ChoiceDelta
from weft.serve.protocols.formatter import Json, to_json
from weft.serve.protocols.logprobs import spelled_logprob
from weft.serve.protocols.openai_formatter import OpenAIFormatter
from weft.text.tokenizer import Tokenizer


class ChatFormatter(OpenAIFormatter):
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
        return self._encoded_chunk(shown, {**self._about_prompt(choice), **extras})

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        text, reasoning, calls, reason = delta.text, delta.reasoning, delta.calls, delta.finish_reason
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
        return self._encoded_chunk(shown, extras)

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
        if self.legacy and choice.calls and choice.finish_reason in ("stop", "tool_calls"):
            return "function_call"
        return choice.finish_reason

    def _about_prompt(self, choice: Choice) -> Json:
        about: Json = {}
        if self.token_ids:
            about["prompt_token_ids"] = list(self.prompt)
        if self.prompt_logprobs and choice.index == 0:
            about["prompt_logprobs"] = self._all_prompt_logprobs(choice, len(self.prompt))
        return about

    def _logprob(self, found: TokenLogprobs) -> Json:
        return spelled_logprob(self.tokenizer, found, self.tokens_as_ids)


_CHAT_TEXT = b',"delta":{"content":'
_CHAT_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _call(index: int, id: str | None, name: str | None, arguments: str) -> Json:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    if id is None:
        return {"index": index, "function": function}
    return {"index": index, "id": id, "type": "function", "function": function}
