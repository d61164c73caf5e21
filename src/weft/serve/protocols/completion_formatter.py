"""CompletionFormatter: the answer format of /v1/completions."""

from collections.abc import Iterable, Sequence

import msgspec

from weft.engine.executor import TokenLogprobs
from weft.serve.output.choice import Choice, ChoiceDelta
from weft.serve.output.token_offsets import TokenOffsets
from weft.serve.protocols.formatter import Json, to_json
from weft.serve.protocols.logprobs import json_logprob
from weft.serve.protocols.openai_formatter import OpenAIFormatter
from weft.text.tokenizer import Tokenizer


class CompletionFormatter(OpenAIFormatter):
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
        if self._shows_prompt_logprobs:
            shown["logprobs"] = self._lists(self._of_prompt(choice, ids), self._prompt_offsets(ids))
        if self.token_ids:
            shown.update(prompt_token_ids=list(ids), token_ids=[])
        if self.prompt_logprobs:
            shown["prompt_logprobs"] = self._all_prompt_logprobs(choice, len(ids))
        return self._encoded_chunk(shown, self._with_shown_usage(extras))

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        if self._is_plain and not (extras or delta.finish_reason):
            end = _TEXT_END if not self.token_ids else _TEXT_END_WITH_ID % delta.token
            return b"%s%d%s%s%s" % (self._head, choice.index, _TEXT, to_json(delta.text), end)
        text = delta.text if self.generates else ""
        shown: Json = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": delta.finish_reason}
        if self.logprobs is not None and self.generates:
            shown["logprobs"] = self._shown_logprobs(choice, delta)
            if not (text or shown["logprobs"] or delta.finish_reason or self.token_ids):
                return b""
        if delta.finish_reason is not None:
            shown["stop_reason"] = choice.stop_reason
        if self.token_ids:
            shown["token_ids"] = [] if delta.token is None or not self.generates else [delta.token]
        return self._encoded_chunk(shown, self._with_shown_usage(extras))

    def _shown_logprobs(self, choice: Choice, delta: ChoiceDelta) -> Json | None:
        """The log probabilities to send with a delta.

        Tokens in withheld text must wait, because a stop string may still remove that text.
        """
        waiting = self._waiting.setdefault(choice.index, [])
        if delta.logprobs is not None:
            waiting.append((delta.offset, delta.logprobs))
        length = self._streamed[choice.index] = self._streamed.get(choice.index, 0) + len(delta.text)
        everything = delta.finish_reason is not None or self.tokenizer is None
        due = [one for one in waiting if everything or one[0] < length]
        if not due:
            return None
        del waiting[: len(due)]  # correct because offsets only grow
        return self._lists([found for _, found in due], self._shifted(choice, (at for at, _ in due), length))

    def last_chunk(self, extras: Json) -> bytes:
        return super().last_chunk(self._with_shown_usage(extras))

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        shown: list[msgspec.Raw] = []
        for start in range(0, len(choices), self.per_prompt):
            group = list(choices[start : start + self.per_prompt])
            if self.keeps < self.per_prompt:
                group = sorted(group, key=_likelihood, reverse=True)[: self.keeps]
            # Encoded one by one, because the encoder holds the GIL.
            shown += [
                msgspec.Raw(to_json(self._choice(choice, len(shown) + offset))) for offset, choice in enumerate(group)
            ]
        return {**self._envelope("text_completion"), "choices": shown, **self._with_shown_usage(extras)}

    def _with_shown_usage(self, extras: Json) -> Json:
        """With max_tokens=0, usage does not count the one token that the engine always samples."""
        if self.generates or "usage" not in extras:
            return extras
        usage = extras["usage"]
        return {**extras, "usage": {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}}

    @property
    def _shows_prompt_logprobs(self) -> bool:
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
            "finish_reason": choice.finish_reason,
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
            logprobs.append(None if isinstance(one, int) else json_logprob(one.logprob))
            if isinstance(one, int):
                tops.append(None)
            else:
                named = {self._name(token): json_logprob(logprob) for token, logprob in one.top.items()}
                tops.append(named | {name: json_logprob(one.logprob)})
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


_TEXT = b',"text":'
_TEXT_END = b',"logprobs":null,"finish_reason":null}]}\n\n'
_TEXT_END_WITH_ID = b',"logprobs":null,"finish_reason":null,"token_ids":[%d]}]}\n\n'


def _likelihood(choice: Choice) -> float:
    """Mean log probability of the choice's tokens."""
    return sum(found.logprob for found in choice.logprobs) / max(1, len(choice.logprobs))
