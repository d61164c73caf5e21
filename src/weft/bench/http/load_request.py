"""One request of a load test, ready to be sent."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadRequest:
    at: float  # seconds from the start of the run; in a closed loop only the order counts
    prompt: str
    prompt_tokens: int  # by the server's tokenizer, including tokens that the server adds around the prompt
    output_tokens: int  # requested; the model's end of text is ignored if the server supports that
    ids: tuple[int, ...] = ()  # token ids, sent instead of the text; for completions only
