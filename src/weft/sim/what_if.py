"""Answers what-if questions of the server's page: a process that reads JSON lines and answers each with one.

A question describes one situation: a number of chats are being written, and one long prompt arrives. The real scheduler
plays it on a device profile under the chosen policy, and under `chunked` and `monolithic` beside it. The answer has the
predicted times under each, and the steps of the chosen one.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from weft.core import Outcome, Scheduler, Source, StepBatch, StepRecord, StepShape, Targets
from weft.errors import WeftError
from weft.sim.compare import make_policy
from weft.sim.profiles import Profile, known_profiles, load_profile, read_profile
from weft.sim.simulator import Played, Truth, play
from weft.sim.traces import Arrival, Trace

SERVER = "this server"  # name of the profile that the server measured itself
QUESTION_S = 6.0  # seconds of work for one question
MOST_CHATS = 256
MOST_CHAT_TOKENS = 4000  # that a chat writes
CHAT_PROMPT = 64  # prompt tokens of each chat
MOST_SHOWN_STEPS = 600  # of the chosen policy
STEPS_BEFORE = 6  # shown steps before the long prompt's first
DESCRIBED_CHATS = 16  # in the decode step that a profile is described by
SHOWN_CHATS = 15  # whose progress the steps name
COMPARED = ("chunked", "monolithic")


class Question(msgspec.Struct, forbid_unknown_fields=True):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=131_072)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2_000)]
    concurrency: Annotated[int, msgspec.Meta(ge=0, le=MOST_CHATS)]  # chats that are being written
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=131_072)]
    policy: Literal["slo", "chunked", "monolithic"]
    gap_target_ms: Annotated[float, msgspec.Meta(gt=0, le=60_000)]
    profile: Annotated[str, msgspec.Meta(max_length=100)]


class Line(msgspec.Struct):
    """What the process reads. Without a question it answers with the profiles."""

    question: msgspec.Raw = msgspec.Raw()
    server: dict[str, Any] | None = None  # the calibration of the server; None: it has none


class QuestionError(WeftError):
    """The question cannot be answered."""


@dataclass(frozen=True)
class Prediction:
    """One policy in the situation. Times in milliseconds."""

    policy: str
    ttft_ms: float  # of the long prompt
    total_ms: float  # from its arrival to its last token
    gap_p50_ms: float  # of the chats, while the long prompt is read or answered
    gap_p99_ms: float
    gap_max_ms: float
    tokens_per_s: float  # that all requests write together in that time
    steps: int


class _WatchedScheduler(Scheduler):
    """A scheduler that shows its records to `watch` as well."""

    watch: Callable[[StepRecord], None]

    def commit(self, batch: StepBatch, outcome: Outcome, started: float, finished: float) -> StepRecord:
        record = super().commit(batch, outcome, started, finished)
        self.watch(record)
        return record


class _ShownSteps:
    """Collects the steps around the long prompt in the form in which the page shows them."""

    def __init__(self, long_prompt: int, num_blocks: int, deadline: float) -> None:
        self._long, self._num_blocks, self._deadline = long_prompt, num_blocks, deadline
        self._number_of_slot: dict[int, int] = {}
        self._shown = {*range(min(SHOWN_CHATS, long_prompt)), long_prompt}
        self._steps: list[dict[str, Any]] = []
        self._read = dict.fromkeys(sorted(self._shown), 0)  # prompt tokens so far, by request
        self._written = dict.fromkeys(sorted(self._shown), 0)
        self._began = False  # the long prompt has started

    def watch(self, record: StepRecord) -> None:
        if time.monotonic() > self._deadline:
            raise QuestionError(
                f"this takes more than {QUESTION_S:g} s to simulate: ask for a shorter prompt or fewer chats"
            )
        batch = record.batch
        assert batch is not None, "only the scheduler makes records"
        for slot, request in record.new_slots:
            self._number_of_slot[slot] = int(request.id)
        if len(self._steps) >= MOST_SHOWN_STEPS + STEPS_BEFORE:
            return
        numbers = [self._number_of_slot[slot] for slot in batch.slots.tolist()]
        split = batch.num_decodes
        rows = zip(numbers, batch.first.tolist(), batch.count.tolist(), batch.is_sampled.tolist(), strict=True)
        slices = [list(row) for row in rows][split:]
        self._began = self._began or any(number == self._long for number, *_ in slices)
        decodes = sorted(self._shown.intersection(numbers[:split]))
        self._steps.append(
            {
                "started_ms": record.started * 1000,
                "ms": (record.finished - record.started) * 1000,
                "num_decodes": split,
                "decodes": decodes,
                "slices": slices,
                "blocks": self._num_blocks - record.free_blocks,
            }
        )
        if not self._began and len(self._steps) > STEPS_BEFORE:
            self._forget_the_first()

    def _forget_the_first(self) -> None:
        """Counts the first step as progress instead of showing it."""
        step = self._steps.pop(0)
        for number in step["decodes"]:
            self._written[number] += 1
        for number, _, count, is_sampled in step["slices"]:
            if number in self._shown:
                self._read[number] += count
                self._written[number] += is_sampled

    def answer(self) -> dict[str, Any]:
        requests = [
            {"number": number, "long": number == self._long, "read": self._read[number], "written": written}
            for number, written in self._written.items()
        ]
        return {"requests": requests, "steps": self._steps[:MOST_SHOWN_STEPS]}


def predict(question: Question, profile: Profile) -> dict[str, Any]:
    """The answer: predictions by policy, and the steps of the chosen policy."""
    _check(question, profile)
    profile = replace(profile, max_num_batched_tokens=question.max_num_batched_tokens)
    trace = _situation(question, profile)
    targets = Targets(gap=question.gap_target_ms / 1000, ttft=1.0, ttft_per_1k=0.25, ttft_source=Source.DEFAULT)
    deadline = time.monotonic() + QUESTION_S
    found: list[Prediction] = []
    shown: dict[str, Any] = {}
    for name in dict.fromkeys((question.policy, *COMPARED)):
        steps = _ShownSteps(question.concurrency, profile.kv_tokens // profile.block_size, deadline)
        scheduler = _WatchedScheduler(
            wave=profile.coefficients.wave,
            policy=make_policy(name, profile, profile.cost_model()),
            num_blocks=profile.kv_tokens // profile.block_size,
            block_size=profile.block_size,
            max_num_seqs=profile.max_num_seqs,
        )
        scheduler.watch = steps.watch
        played = play(trace, scheduler, Truth(profile.coefficients), targets, host=profile.host)
        found.append(_prediction(name, played, question.concurrency))
        if name == question.policy:
            shown = steps.answer()
    return {
        "predictions": [asdict(one) for one in found],
        "chat_prompt_tokens": CHAT_PROMPT,
        "block_size": profile.block_size,
        "num_blocks": profile.kv_tokens // profile.block_size,
        "origin": profile.origin,
        **shown,
    }


def _check(question: Question, profile: Profile) -> None:
    tokens = question.prompt_tokens + question.output_tokens
    if tokens > profile.max_model_len:
        raise QuestionError(
            f"{tokens:,} tokens of prompt and output do not fit into the context of {profile.max_model_len:,} on "
            f"{profile.name}"
        )
    if question.concurrency >= profile.max_num_seqs:
        raise QuestionError(
            f"{question.concurrency} chats and one more request are more than the {profile.max_num_seqs} that run at "
            f"once on {profile.name}"
        )
    if tokens + question.concurrency * 2 * CHAT_PROMPT > profile.kv_tokens:
        raise QuestionError(
            f"{tokens:,} tokens and {question.concurrency} chats do not fit into the KV cache of {profile.kv_tokens:,} "
            f"tokens on {profile.name}"
        )
    smallest = profile.coefficients.smallest_step * 1000
    if question.policy == "slo" and question.gap_target_ms <= smallest:
        raise QuestionError(
            f"a gap of {question.gap_target_ms:g} ms cannot be kept: an empty step takes {smallest:.2f} ms on "
            f"{profile.name}"
        )
    if question.max_num_batched_tokens <= question.concurrency:
        raise QuestionError(
            f"a step of at most {question.max_num_batched_tokens} tokens has no room for a prompt beside "
            f"{question.concurrency} chats, which need a token each"
        )


def _situation(question: Question, profile: Profile) -> Trace:
    """The chats, which have begun to write, and then the long prompt. The chats write until it is answered."""
    chats, costs = question.concurrency, profile.coefficients
    decode = _decode_seconds(chats + 1, profile)
    reading = costs.prefill_seconds(0, question.prompt_tokens)
    begun = 4 * costs.prefill_seconds(0, max(1, chats * CHAT_PROMPT)) + 24 * decode  # the chats write by then
    room = min(MOST_CHAT_TOKENS, profile.max_model_len - CHAT_PROMPT, _room_of_a_chat(question, profile))
    written = max(1, min(room, int((begun + 4 * reading) / decode) + 2 * question.output_tokens))
    arrivals = [Arrival(0.0, CHAT_PROMPT, written) for _ in range(chats)]
    return Trace("what if", (*arrivals, Arrival(begun, question.prompt_tokens, question.output_tokens)))


def _decode_seconds(chats: int, profile: Profile) -> float:
    """Seconds of a step of so many chats."""
    shape = StepShape(tokens=chats, decodes=chats, context=chats * 2 * CHAT_PROMPT)
    return profile.coefficients.predict(shape) + profile.host.step


def _room_of_a_chat(question: Question, profile: Profile) -> int:
    """Tokens that each chat may write so that none is preempted."""
    rest = profile.kv_tokens - question.prompt_tokens - question.output_tokens - 2 * profile.block_size
    return rest // max(1, question.concurrency) - CHAT_PROMPT - profile.block_size


def _prediction(name: str, played: Played, long_prompt: int) -> Prediction:
    arrival, finished = float(played.arrival[long_prompt]), float(played.finished[long_prompt])
    ttft = float(played.ttft[long_prompt])
    if not np.isfinite(finished):
        raise QuestionError(f"under {name} the long prompt is not answered: ask for a shorter prompt or fewer chats")
    gaps, tokens = [], 0
    for owner in range(long_prompt + 1):
        own = played.gaps[played.gap_owner == owner]
        ends = float(played.arrival[owner] + played.ttft[owner]) + np.cumsum(own)
        inside = (ends >= arrival) & (ends <= finished + 1e-9)
        tokens += int(inside.sum())
        if owner < long_prompt or not long_prompt:
            gaps.append(own[inside])
    seconds = max(1e-9, finished - arrival)
    every = np.concatenate(gaps) * 1000
    p50, p99, most = np.percentile(every, (50, 99, 100)).tolist() if len(every) else (0.0, 0.0, 0.0)
    return Prediction(
        name, ttft * 1000, (finished - arrival) * 1000, p50, p99, most, (tokens + 1) / seconds, played.steps
    )


def describe(profiles: "dict[str, Profile]") -> dict[str, Any]:
    """The profiles that a question may name, with their limits."""
    return {
        "profiles": [
            {
                "name": name,
                "origin": profile.origin,
                "max_model_len": profile.max_model_len,
                "max_num_seqs": profile.max_num_seqs,
                "max_num_batched_tokens": profile.max_num_batched_tokens,
                "smallest_step_ms": profile.coefficients.smallest_step * 1000,
                "decode_step_ms": _decode_seconds(DESCRIBED_CHATS, profile) * 1000,
            }
            for name, profile in profiles.items()
        ],
        "most_chats": MOST_CHATS,
    }


def answer(line: bytes) -> dict[str, Any]:
    """The answer to a line, or an object with an error in words."""
    try:
        read = msgspec.json.decode(line, type=Line)
        if not bytes(read.question):
            return describe(_profiles(read.server))
        question = msgspec.json.decode(read.question, type=Question)
        profiles = _profiles(read.server)
        if question.profile not in profiles:
            raise QuestionError(f"unknown profile {question.profile!r}; known: {', '.join(profiles)}")
        return predict(question, profiles[question.profile])
    except RecursionError:
        return {"error": "the question is nested too deeply"}
    except (msgspec.MsgspecError, WeftError) as error:
        return {"error": str(error)}


def _profiles(server: dict[str, Any] | None) -> dict[str, Profile]:
    found = {} if server is None else {SERVER: read_profile(SERVER, server)}
    return {**found, **{name: load_profile(name) for name in known_profiles()}}


def rounded(value: Any) -> Any:
    """The same with floats of at most 4 digits behind the point, which is what a page shows."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def lines() -> Iterator[bytes]:
    while line := sys.stdin.buffer.readline():
        yield line


def main() -> None:
    if hasattr(os, "nice"):
        os.nice(19)  # a device that is a CPU has more important work
    for line in lines():
        sys.stdout.write(json.dumps(rounded(answer(line)), separators=(",", ":")) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
