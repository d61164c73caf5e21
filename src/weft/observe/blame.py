"""Blame: why a token was late. Divides each late gap and each late first token among its causes; the parts add up."""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from weft.observe.recording import EngineRun, Recording


class Cause(StrEnum):
    PREFILL = "prefill"  # slices of other requests' prompts in the same steps
    OWN_PREFILL = "own_prefill"  # of a first token: the slices of its own prompt
    DECODES = "decodes"  # the decode batch, the request itself included
    QUEUE = "queue"  # waited to be screened and started, behind other prompts
    SEATS = "seats"  # waited because max_num_seqs requests ran
    BLOCKS = "blocks"  # waited because the KV cache was full
    PREEMPTION = "preemption"  # lost its blocks: waited again, and recomputed
    GRAMMAR = "grammar"  # the mask of its next token was not ready
    HOST = "host"  # the device idled: planning, submitting, committing, receiving and sending
    API = "api"  # the API process: parsing, tokenizing, event loop, detokenizing, formatting
    CLIENT = "client"  # the client reads slowly
    TRANSFER = "transfer"  # KV blocks on their way between workers
    UNEXPLAINED = "unexplained"


class Part(NamedTuple):
    cause: Cause
    seconds: float
    keys: tuple[int, ...] = ()  # sequences that caused it, for PREFILL and PREEMPTION; most of it first


class LateToken(NamedTuple):
    """A token that came later than its target. `seconds` is the whole time, and the sum of the parts."""

    key: int
    token_index: int  # 0: a first token, late after its arrival; else late after the token before
    began: float
    ended: float
    target: float  # seconds
    is_promised: bool
    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def late_tokens(run: EngineRun, recording: Recording) -> Iterator[LateToken]:
    """The late tokens of an engine process, in order of time."""
    raise NotImplementedError
