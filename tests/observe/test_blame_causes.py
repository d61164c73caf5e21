"""Each cause, on recordings made by hand, where the right answer is known to the millisecond."""

from collections.abc import Sequence

import numpy as np
import pytest

from weft.core.step import WaitsFor
from weft.observe.blame import Cause, LateToken, Part, late_tokens
from weft.observe.blame_summary import Reader, summary
from weft.observe.frames import EngineFrame, LateChunk, PromptFrame, RequestFrame, StepFrame
from weft.observe.recording import EngineRun, Recording

MS = 1e-3


def info(gap_target: float | None = None, gap_promised: bool = False) -> EngineFrame:
    return EngineFrame(
        engine="0",
        time=0.0,
        epoch=0.0,
        weft="0",
        model="m",
        device="d",
        policy="slo",
        gap_target=gap_target,
        gap_promised=gap_promised,
        ttft_target=None,
        ttft_target_per_1k=0.0,
        ttft_promised=False,
        max_num_seqs=8,
        num_blocks=100,
        block_size=16,
        enable_prefix_caching=True,
        max_num_batched_tokens=2048,
    )


def prompt(
    key: int,
    arrival: float = 0.0,
    time: float | None = None,
    *,
    gap: float | None = 15 * MS,
    ttft: float | None = None,
    constrained: bool = False,
) -> PromptFrame:
    taken = arrival if time is None else time
    return PromptFrame("0", key, taken, arrival, 100, 50, gap, True, ttft, True, False, 0, constrained)


def step(
    number: int,
    started: float,
    finished: float,
    decodes: Sequence[int] = (),
    slices: Sequence[tuple[int, int, int, bool]] = (),
    *,
    host: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    waits_for: WaitsFor = "",
    preempted: Sequence[int] = (),
) -> StepFrame:
    """Times in milliseconds."""
    tokens = len(decodes) + sum(count for _, _, count, _ in slices)
    return StepFrame(
        engine="0",
        number=number,
        started=started * MS,
        finished=finished * MS,
        predicted=None,
        decodes=np.array(decodes, np.int32).tobytes(),
        slices=list(slices),
        shape=(tokens, 0.0, len(slices), len(decodes), 0, 0.0),
        host=host,
        prefill_limit="",
        waits_for=waits_for,
        preempted=list(preempted),
        running=0,
        waiting=0,
        queued_tokens=0,
        free_blocks=0,
        cached_tokens=0,
        lost_tokens=0,
        starved=False,
    )


def request(key: int, output_tokens: int, chunks: Sequence[LateChunk] = (), **changes: object) -> RequestFrame:
    fields: dict[str, object] = {
        "engine": "0",
        "key": key,
        "request_id": "",
        "tenant": "",
        "choice_index": 0,
        "arrival": 0.0,
        "parsed": 0.0,
        "started": 0.0,
        "first_token": None,
        "first_sent": None,
        "finished": 1.0,
        "reason": "stop",
        "prompt_tokens": 100,
        "output_tokens": output_tokens,
        "cached_tokens": 0,
        "preemptions": 0,
        "predicted_ttft": None,
        "stream": True,
        "late_chunks": list(chunks),
    }
    return RequestFrame(**(fields | changes))  # type: ignore[arg-type]


def late(
    steps: list[StepFrame],
    prompts: Sequence[PromptFrame],
    requests: Sequence[RequestFrame] = (),
    start: EngineFrame | None = None,
) -> list[LateToken]:
    run = EngineRun(start, steps, {one.key: one for one in prompts}, {one.key: one for one in requests})
    found = list(late_tokens(run, Recording([run])))
    for token in found:
        assert sum(part.seconds for part in token.parts) == pytest.approx(token.seconds)
    return found


def causes(token: LateToken) -> dict[Cause, float]:
    """Milliseconds."""
    return {part.cause: pytest.approx(part.seconds / MS, abs=1e-6) for part in token.parts}


# Sequence 0 has read its prompt in step 1, and decodes; decode steps take 10 ms.
FIRST = step(1, 0, 10, slices=[(0, 0, 100, True)])


def test_idle_time_of_the_device_is_host_time_and_overlapped_host_time_is_not() -> None:
    steps = [
        FIRST,
        step(2, 10, 20, [0], host=(4 * MS, 4 * MS, 1 * MS, 0.5 * MS)),  # planned while step 1 ran
        step(3, 27, 37, [0], host=(4 * MS, 9 * MS, 1 * MS, 0.5 * MS)),
        step(4, 37, 47, [0], host=(4 * MS, 4 * MS, 1 * MS, 0.5 * MS)),
    ]
    (token,) = late(steps, [prompt(0)])
    assert (token.key, token.token_index, token.began, token.ended) == (0, 2, 20 * MS, 37 * MS)
    assert causes(token) == {Cause.DECODES: 10, Cause.HOST: 7}
    assert token.target == 15 * MS
    assert token.is_promised
    assert token.output_tokens == 4


def test_steps_that_seem_to_overlap_count_once() -> None:
    steps = [FIRST, step(2, 8, 50, (), [(7, 0, 900, True)]), step(3, 45, 60, [0, 7])]
    (token,) = late(steps, [prompt(0)])
    assert causes(token) == {Cause.PREFILL: 40, Cause.DECODES: 10}


def test_slices_of_others_by_tokens_beyond_a_decode_step() -> None:
    steps = [FIRST, step(2, 10, 20, [0]), step(3, 20, 60, [0], [(7, 0, 200, False), (8, 0, 100, False)])]
    (token,) = late(steps, [prompt(0)])
    assert causes(token) == {Cause.PREFILL: 30, Cause.DECODES: 10}
    assert token.parts[0] == Part(Cause.PREFILL, pytest.approx(30 * MS), (7, 8), pytest.approx((20 * MS, 10 * MS)))


def test_prompts_that_go_first_delay_a_decode_that_is_not_in_the_step() -> None:
    """As under `monolithic`."""
    (token,) = late([FIRST, step(2, 10, 50, (), [(7, 0, 900, True)]), step(3, 50, 60, [0, 7])], [prompt(0)])
    assert causes(token) == {Cause.PREFILL: 40, Cause.DECODES: 10}


def test_a_step_that_takes_far_longer_than_its_like_is_a_slow_step() -> None:
    steps = [FIRST, *[step(2 + i, 10 + 10 * i, 20 + 10 * i, [0]) for i in range(9)], step(11, 100, 190, [0])]
    (token,) = late(steps, [prompt(0)])
    assert causes(token) == {Cause.SLOW_STEP: 77.5, Cause.DECODES: 12.5}


def test_a_preempted_sequence() -> None:
    steps = [
        FIRST,
        step(2, 10, 20, [0]),
        step(3, 20, 30, [5], [(7, 0, 100, True)], preempted=[0]),
        step(4, 30, 40, [5, 7]),
        step(5, 40, 50, [5, 7], [(0, 0, 60, False)]),
        step(6, 50, 70, [5, 7], [(0, 60, 42, True)]),
        step(7, 70, 80, [0, 5, 7]),
    ]
    (token,) = late(steps, [prompt(0)])
    assert (token.began, token.ended) == (20 * MS, 70 * MS)
    # Three steps without it or with its own slices; in the last step, its own slice takes what a decode step does not.
    assert causes(token) == {Cause.PREEMPTION: 40, Cause.DECODES: 10}
    assert token.parts[0].keys == (7,)


@pytest.mark.parametrize("preempted", [True, False])
def test_a_sequence_that_is_preempted_while_its_prompt_is_read(preempted: bool) -> None:
    steps = [
        step(1, 0, 10, [5]),
        step(2, 10, 20, (), [(0, 0, 50, False)]),
        step(3, 20, 30, [5], preempted=[0] if preempted else []),
        step(4, 30, 40, (), [(0, 0, 50, False)]),
        step(5, 40, 50, (), [(0, 50, 50, True)]),
    ]
    (token,) = late(steps, [prompt(0, 10 * MS, ttft=1 * MS)])
    if preempted:
        assert causes(token) == {Cause.PREEMPTION: 20, Cause.OWN_PREFILL: 20}
    else:
        assert causes(token) == {Cause.OWN_PREFILL: 30, Cause.DECODES: 10}


def test_a_mask_that_is_not_ready() -> None:
    """A constrained sequence is in every second step anyway: its mask needs the token before."""
    steps = [
        FIRST,
        step(2, 10, 20, [5]),
        step(3, 20, 30, [0, 5]),
        step(4, 30, 40, [5]),
        step(5, 40, 50, [5]),
        step(6, 52, 62, [5]),
        step(7, 62, 72, [0, 5]),
    ]
    (token,) = late(steps, [prompt(0, gap=25 * MS, constrained=True)])
    assert (token.began, token.ended) == (30 * MS, 72 * MS)
    assert causes(token) == {Cause.GRAMMAR: 22, Cause.DECODES: 20}


def test_a_gap_that_is_late_only_at_the_client() -> None:
    steps = [
        FIRST,
        step(2, 10, 20, [0], host=(0.0, 0.0, 1 * MS, 0.0)),
        step(3, 20, 30, [0], host=(0.0, 0.0, 1 * MS, 0.0)),
    ]
    slow_api = LateChunk(1, 24 * MS, 40 * MS, 0.0, 11 * MS)
    slow_client = LateChunk(2, 31 * MS, 70 * MS, 25 * MS, 40 * MS)
    first, second = late(steps, [prompt(0)], [request(0, 3, [slow_api, slow_client])])
    assert (first.token_index, first.began, first.ended) == (1, 11 * MS, 40 * MS)
    assert causes(first) == {Cause.API: 19, Cause.DECODES: 9, Cause.HOST: 1}
    # The step had ended before the chunk before was sent: the API process sent both late, and the client read slowly.
    assert causes(second) == {Cause.CLIENT: 25, Cause.API: 5}


def test_what_the_client_did_not_see_is_not_late() -> None:
    steps = [FIRST, step(2, 10, 20, [0]), step(3, 40, 50, [0])]
    assert len(late(steps, [prompt(0)])) == 1
    assert late(steps, [prompt(0)], [request(0, 3)]) == []
    assert len(late(steps, [prompt(0)], [request(0, 3, stream=False)])) == 1


def test_a_chunk_of_several_tokens_and_one_that_does_not_say_when_the_one_before_was_sent() -> None:
    steps = [FIRST, step(2, 10, 20, [0]), step(3, 20, 30, [0]), step(4, 33, 43, [0])]
    chunk = LateChunk(3, 43 * MS, 43 * MS, 0.0, 11 * MS)
    (token,) = late(steps, [prompt(0)], [request(0, 4, [chunk])])
    assert causes(token) == {Cause.DECODES: 29, Cause.HOST: 3}
    chunk = LateChunk(3, 50 * MS, 50 * MS, 0.0)
    (token,) = late(steps, [prompt(0)], [request(0, 4, [chunk])])
    assert (token.began, token.ended) == (30 * MS, 50 * MS)
    assert causes(token) == {Cause.DECODES: 10, Cause.API: 7, Cause.HOST: 3}


def test_a_first_token_from_the_socket_to_the_socket() -> None:
    steps = [
        step(0, -10, 0, [5]),
        step(1, 0, 20, [5], [(7, 0, 10, False)], waits_for="blocks"),  # planned before the request arrived
        step(2, 20, 30, [5]),
        step(3, 30, 50, [5], [(7, 10, 10, True)], waits_for="budget"),
        step(4, 50, 60, [5], waits_for="seats"),
        step(5, 60, 70, [5], waits_for="blocks"),
        step(6, 75, 115, [5], [(0, 0, 90, False), (8, 0, 10, True)]),
        step(7, 115, 125, (), [(0, 90, 10, True)], host=(0.0, 0.0, 2 * MS, 0.0)),
    ]
    one = prompt(0, arrival=2 * MS, time=15 * MS, ttft=50 * MS)
    seen = request(0, 1, arrival=2 * MS, parsed=10 * MS, first_token=125 * MS, first_sent=130 * MS)
    (token,) = late(steps, [one], [seen])
    assert (token.token_index, token.began, token.ended) == (0, 2 * MS, 130 * MS)
    assert causes(token) == {
        Cause.API: 8 + 3,
        Cause.QUEUE: 5 + 10,  # half of the step that ran, and step 3
        Cause.DECODES: 5 + 10 + 10 + 10,
        Cause.SEATS: 10,
        Cause.BLOCKS: 10,
        Cause.HOST: 5 + 2,
        Cause.OWN_PREFILL: 27 + 10,
        Cause.PREFILL: 3,
    }
    by_cause = {part.cause: part for part in token.parts}
    assert by_cause[Cause.QUEUE].keys == (7,)
    assert by_cause[Cause.PREFILL].keys == (8,)
    assert token.is_promised


def test_a_recording_that_begins_in_the_middle() -> None:
    """The targets are the engine's, and indices count from what the request says at its end."""
    steps = [step(8, 10, 20, [0]), step(9, 20, 50, [0], [(7, 0, 10, True)])]
    assert late(steps, []) == []
    (token,) = late(steps, [], [request(0, 40, stream=False)], info(15 * MS, gap_promised=True))
    assert (token.token_index, token.target, token.is_promised) == (39, 15 * MS, True)
    assert causes(token) == {Cause.PREFILL: 20, Cause.DECODES: 10}


def test_goals_are_for_requests_without_a_target() -> None:
    steps = [step(1, 0, 10, (), [(0, 0, 50, True), (1, 0, 50, True)]), step(2, 10, 20, [0, 1]), step(3, 20, 50, [0, 1])]
    prompts = {0: prompt(0, gap=None), 1: prompt(1, gap=40 * MS, ttft=40 * MS)}
    run = EngineRun(None, steps, prompts, {0: request(0, 3), 1: request(1, 3)})
    assert list(late_tokens(run, Recording([run]))) == []
    found = list(late_tokens(run, Recording([run]), gap_goal=20 * MS, ttft_goal=5 * MS))
    assert [(token.key, token.token_index, token.target) for token in found] == [(0, 0, 5 * MS), (0, 2, 20 * MS)]
    assert not any(token.is_promised for token in found)


def test_tokens_after_the_stop_do_not_count() -> None:
    steps = [FIRST, step(2, 10, 20, [0]), step(3, 40, 50, [0, -1])]
    assert late(steps, [prompt(0)], [request(0, 2, stream=False)]) == []


def test_an_empty_run() -> None:
    assert late([], []) == []
    assert late([], [prompt(0)], [request(0, 0, reason="refused")]) == []


def token(key: int, index: int, target: float, *parts: tuple[Cause, float], tokens: int = 11) -> LateToken:
    found = tuple(Part(cause, ms * MS, (9,), (ms * MS,)) for cause, ms in parts)
    return LateToken(key, index, 0.0, sum(part.seconds for part in found), target * MS, True, found, tokens)


def test_the_summary_names_one_cause_for_each_broken_promise() -> None:
    found = summary(
        [
            token(1, 0, 100, (Cause.QUEUE, 120), (Cause.OWN_PREFILL, 90)),
            # The decodes alone take longer than the target: without the prompts, it would be late as well.
            token(2, 4, 20, (Cause.DECODES, 60), (Cause.PREFILL, 30)),
            # Here they leave it room, though they take longer than the slices.
            token(3, 4, 20, (Cause.DECODES, 18), (Cause.PREFILL, 12)),
            token(3, 5, 20, (Cause.HOST, 21)),
            # Kept: two gaps of 300 are late.
            token(4, 5, 20, (Cause.API, 30), tokens=301),
            token(4, 6, 20, (Cause.API, 30), tokens=301),
        ]
    )
    assert found.broken == {Cause.QUEUE: 1, Cause.DECODES: 1, Cause.PREFILL: 1}
    assert found.broken_promises == 3
    assert (found.late_gaps, found.late_first_tokens) == (5, 1)
    assert list(found.gap_seconds) == [Cause.DECODES, Cause.API, Cause.PREFILL, Cause.HOST]
    assert found.gap_seconds[Cause.DECODES] == pytest.approx(78 * MS)
    assert found.first_token_seconds == pytest.approx({Cause.QUEUE: 120 * MS, Cause.OWN_PREFILL: 90 * MS})
    assert found.readers == (Reader(9, pytest.approx(42 * MS)),)
