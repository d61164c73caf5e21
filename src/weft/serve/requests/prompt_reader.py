"""PromptReader: the prompts of a body as token ids."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from weft.errors import EMPTY_PROMPT, RequestError
from weft.serve.engines.messages import EngineInfo
from weft.serve.protocols.openai_bodies import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    TokenizeBody,
)
from weft.serve.requests.prompt_length import TokenIds, kept_tokens, too_long, truncate_prompt
from weft.serve.requests.text_processor import INLINE_SIZE, TextProcessor
from weft.serve.requests.tool_choice import ToolChoice


@dataclass(frozen=True)
class PromptReader:
    """Encodes prompts and renders chats, with the limits of the engine."""

    texts: TextProcessor

    async def encode_completion(self, body: CompletionBody, n: int, info: EngineInfo, keeps: int) -> list[TokenIds]:
        """The prompts of a completion, truncated to `keeps` tokens. Each is text or token ids in the body."""
        given = body.prompt
        prompts = [given] if isinstance(given, str) or (given and _is_number(given[0])) else given
        if not prompts:
            raise RequestError(EMPTY_PROMPT)
        if len(prompts) > MAX_PROMPTS or len(prompts) * n > MAX_SEQUENCES:
            raise RequestError(
                f"prompt: {len(prompts)} prompts with n={n} are too many at once: at most {MAX_PROMPTS} prompts and "
                f"{MAX_SEQUENCES} completions fit into one request"
            )
        encoded = []
        characters = 0
        for prompt in prompts:
            ids = await self._token_ids(prompt, body, info, keeps)
            encoded.append(truncate_prompt(ids, body, keeps))
            characters += len(prompt) if isinstance(prompt, str) else 0
            if characters > INLINE_SIZE:  # short texts are encoded on the event loop: let other tasks run
                characters = 0
                await asyncio.sleep(0)
        return encoded

    async def _token_ids(self, prompt: Any, body: CompletionBody, info: EngineInfo, keeps: int) -> TokenIds:
        if isinstance(prompt, str):
            most = None if keeps else info.max_model_len
            ids = await self.texts.encode(prompt, body.add_special_tokens is not False, most)
            if not ids:
                raise RequestError(EMPTY_PROMPT)
            return ids
        if isinstance(prompt, list) and keeps and len(prompt) > keeps:
            prompt = truncate_prompt(prompt, body, keeps)
        if isinstance(prompt, list) and len(prompt) >= info.max_model_len:
            raise too_long(len(prompt), None, info, "prompt")  # before checking each of perhaps a million tokens
        if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:  # excludes bool, a subclass of int
            raise RequestError("prompt must be text, a list of token ids, or a list of either")
        if not prompt:
            raise RequestError(EMPTY_PROMPT)
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < info.vocab_size:
                raise RequestError(f"prompt names token id {token}, outside 0..{info.vocab_size - 1}")
        return prompt

    async def encode_chat(
        self, body: ChatBody, size: int, tools: ToolChoice, max_tokens: int | None, info: EngineInfo
    ) -> tuple[TokenIds, str]:
        """Token ids of a chat's prompt, truncated if asked for, and the prompt text before truncation.

        `size` is RequestContext.size.
        """
        keeps = kept_tokens(body, max_tokens, info)
        options: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            options.setdefault("reasoning_effort", body.reasoning_effort)
            options.setdefault("enable_thinking", body.reasoning_effort != "none")
        continues = _continues(body)
        options |= {
            "tools": tools.shown,
            "documents": body.documents,
            "add_generation_prompt": body.add_generation_prompt is not False and not continues,
        }
        most = None if keeps else info.max_model_len
        ids, text = await self.texts.encode_chat(body.messages, size, options, continues=continues, most=most)
        return truncate_prompt(ids, body, keeps), text

    async def chat_token_ids(self, body: TokenizeBody, size: int) -> TokenIds:
        """Token ids that a chat with these messages would send to the model. `size` is RequestContext.size."""
        messages, options = body.messages or [], dict(body.chat_template_kwargs or {})
        continues = _continues(body)
        options.update(
            tools=body.tools, add_generation_prompt=body.add_generation_prompt is not False and not continues
        )
        return (await self.texts.encode_chat(messages, size, options, continues=continues))[0]

    async def decode(self, ids: TokenIds, special: bool = False) -> str:
        """The text of a prompt; with `special`, special tokens too."""
        decode = partial(self.texts.require_tokenizer().decode, ids, skip_special_tokens=not special)
        return await self.texts.run_offloaded(4 * len(ids), decode)


def _continues(body: ChatBody | TokenizeBody) -> bool:
    """Whether the model continues the last message."""
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError("continue_final_message cannot stand beside add_generation_prompt: set one of them to false")
    return bool(body.continue_final_message)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
