"""The formats of log probabilities: OpenAI's for chats, and vLLM's for prompts."""

from weft.engine.executor import TokenLogprobs
from weft.serve.protocols.formatter import Json
from weft.text.tokenizer import Tokenizer


def spelled_logprob(tokenizer: Tokenizer | None, found: TokenLogprobs, tokens_as_ids: bool = False) -> Json:
    """A token and its most likely alternatives, in the format of chat completions."""

    def entry(token: int, logprob: float) -> Json:
        spelled = tokenizer.token_bytes(token) if tokenizer is not None else b""
        name = token_name(None if tokens_as_ids else tokenizer, token)
        return {"token": name, "logprob": json_logprob(logprob), "bytes": list(spelled)}

    top = [entry(token, logprob) for token, logprob in found.top.items()]
    return {**entry(found.token, found.logprob), "top_logprobs": top}


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token's text; without a tokenizer, its id in vLLM's notation."""
    return tokenizer.token_text(token) if tokenizer is not None else f"token_id:{token}"


def json_logprob(logprob: float) -> float:
    """At least -9999, which other servers send for an impossible token too. JSON has no infinity."""
    return max(logprob, -9999.0)
