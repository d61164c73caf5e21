"""Length checks: truncation of prompts, the context limit, and the size of prompt logprobs."""

from weft.engine.params import SamplingParams
from weft.errors import RequestError
from weft.serve.engines.messages import EngineInfo
from weft.serve.errors import ApiError
from weft.serve.protocols.openai_bodies import ChatBody, SamplingBody

TokenIds = list[int]
MOST_PROMPT_LOGPROBS = 1_000_000  # prompt log probabilities in one answer: about 50 MB


def kept_tokens(body: SamplingBody, max_tokens: int | None, info: EngineInfo) -> int:
    """The number of prompt tokens that truncation keeps; 0: no truncation."""
    most = body.truncate_prompt_tokens
    if most is None:
        return 0
    if most == -1:
        return max(1, info.max_model_len - max(1, max_tokens or 1))
    if most < 1:
        raise RequestError(f"truncate_prompt_tokens={most} must be at least 1, or -1 for all that there is room for")
    return most


def truncate_prompt(ids: TokenIds, body: SamplingBody, keeps: int) -> TokenIds:
    """The prompt, truncated to `keeps` tokens on the side that the client chose."""
    if not keeps:
        return ids
    return ids[:keeps] if body.truncation_side == "right" else ids[-keeps:]


def says_length(body: SamplingBody) -> bool:
    return body.max_tokens is not None or getattr(body, "max_completion_tokens", None) is not None


def prompt_field(body: SamplingBody) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def check_length(prompt_tokens: int, max_tokens: int | None, info: EngineInfo, field: str) -> None:
    if prompt_tokens + (max_tokens or 1) > info.max_model_len:
        raise too_long(prompt_tokens, max_tokens, info, field)


def check_prompt_logprobs(prompts: list[TokenIds], params: SamplingParams) -> None:
    """Raises if the answer would have too many prompt log probabilities. Each choice repeats its prompt's.

    Alternatives may appear twice in the answer: in OpenAI's format and in vLLM's.
    """
    if params.prompt_logprobs is None:
        return
    shown = params.n * sum(map(len, prompts)) * (1 + params.prompt_logprobs)
    if shown > MOST_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs: {shown} log probabilities of prompts are too many for one answer, which may have "
            f"{MOST_PROMPT_LOGPROBS}: ask for fewer, or send fewer prompts, or lower n"
        )


def too_long(prompt_tokens: int, max_tokens: int | None, info: EngineInfo, field: str) -> ApiError:
    alone = max_tokens is None or prompt_tokens >= info.max_model_len
    wanted = f"{prompt_tokens} tokens" if alone else f"{prompt_tokens} tokens and asks for {max_tokens} more"
    # Clients recognise the first sentence, which OpenAI and other servers send too.
    return ApiError(
        400,
        f"This model's maximum context length is {info.max_model_len} tokens. However, the prompt has {wanted}: "
        "shorten the prompt or lower max_tokens",
        param=field if alone else "max_tokens",
        code="context_length_exceeded",
    )
