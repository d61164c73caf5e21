"""What is sent: one request of a run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    at: float  # seconds from the start of the run; in a closed loop only the order counts
    prompt: str
    prompt_tokens: int  # by the server's tokenizer, whatever it puts around the prompt included
    output_tokens: int  # wanted; the model's end of text is ignored where the server can
    ids: tuple[int, ...] = ()  # a prompt of token ids, in the place of the text; for completions only
