"""Scripted schedules: a few requests, and the table of steps a person would expect."""

import pytest

from tests.step_lines import line_of
from tests.toy import ToyExecutor, solo, toy_loop, toy_stream
from weft.core import Coefficients, CostModel, Plan, Request, State, slo
from weft.engine.loop import Loop
from weft.engine.sequence import Sequence
from weft.errors import RequestError


def run(loop: Loop, *, steps: int = 10_000) -> list[str]:
    """Runs until idle; returns one line a step, such as "a:5+1* b:0+16" (see `line_of`)."""
    lines: list[str] = []
    plan_of = loop.scheduler.plan

    def watched(now: float) -> Plan:
        plan = plan_of(now)
        if plan.batch is not None:
            lines.append(line_of(loop.scheduler.steps_in_flight[-1]))
        return plan

    loop.scheduler.plan = watched  # type: ignore[method-assign]
    while loop.has_work and len(lines) < steps:
        loop.step()
    loop.scheduler.plan = plan_of  # type: ignore[method-assign]
    return lines


def prompt(tag: int, length: int) -> list[int]:
    return [1 + (tag * 13 + tag // 49 + i * (i + tag)) % 49 for i in range(length)]


def test_decodes_come_first_and_a_long_prompt_is_cut_into_what_the_budget_leaves() -> None:
    loop = toy_loop(budget=8, depth=0)
    loop.add(toy_stream("a", prompt(1, 3), 5))
    loop.add(toy_stream("b", prompt(2, 20), 2))
    assert run(loop) == [
        "a:0+3* b:0+5",
        "a:3+1* b:5+7",
        "a:4+1* b:12+7",
        "a:5+1* b:19+1*",
        "a:6+1* b:20+1*",
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_those_of_a_solo_run_and_nothing_is_left_behind(depth: int) -> None:
    loop = toy_loop(depth=depth)
    streams = [toy_stream(f"r{i}", prompt(i, 5 + 9 * i), 12) for i in range(6)]
    for stream in streams:
        loop.add(stream)
    run(loop)
    for stream in streams:
        assert stream.output == solo(stream.prompt.tolist(), 12)
        assert stream.request.state is State.FINISHED
    loop.scheduler.check_integrity()
    assert loop.scheduler.kv.block_pool.num_free == loop.scheduler.kv.block_pool.num_blocks


def test_a_stop_is_noticed_one_step_late_and_the_surplus_token_is_thrown_away() -> None:
    ending = next(p for i in range(1000) if len(solo(p := prompt(i, 4), 30)) == 5)
    for depth, steps in ((0, 5), (1, 6)):
        loop = toy_loop(depth=depth)
        stream = toy_stream("a", ending, 30)
        loop.add(stream)
        assert len(run(loop)) == steps
        assert stream.output == solo(ending, 30)
        assert stream.request.finish_reason == "stop"


def test_a_request_at_its_length_is_not_planned_again() -> None:
    loop = toy_loop(depth=1)
    stream = toy_stream("a", prompt(0, 4), 3)
    loop.add(stream)
    assert run(loop) == ["a:0+4*", "a:4+1*", "a:5+1*"]
    assert stream.request.finish_reason == "length"


@pytest.mark.parametrize("depth", [0, 1])
def test_equal_prompts_in_the_same_step_are_computed_once(depth: int) -> None:
    loop = toy_loop(num_blocks=600, budget=4096, depth=depth)
    both = [toy_stream(name, prompt(3, 1000), 4) for name in "ab"]
    for stream in both:
        loop.add(stream)
    assert run(loop)[0] == "a:0+1000* b:996+4*"
    assert [s.output for s in both] == [solo(prompt(3, 1000), 4)] * 2
    assert both[1].request.cached_tokens == 996


def test_a_follower_takes_over_what_its_leader_computes_between_its_slices() -> None:
    loop = toy_loop(budget=10, depth=0)
    loop.add(toy_stream("a", prompt(3, 24), 1))
    loop.add(toy_stream("b", prompt(3, 24), 1))
    assert run(loop) == ["a:0+10", "a:10+10", "a:20+4* b:20+4*"]


def test_salted_requests_share_nothing() -> None:
    loop = toy_loop(budget=64, depth=0)
    loop.add(toy_stream("a", prompt(3, 24), 1, salt="one tenant"))
    loop.add(toy_stream("b", prompt(3, 24), 1, salt="another"))
    assert run(loop) == ["a:0+24* b:0+24*"]


def test_generated_blocks_are_found_by_the_next_turn_of_a_conversation() -> None:
    loop = toy_loop(depth=1)
    first = next(p for i in range(100) if len(solo(p := prompt(i, 6), 10)) == 10)
    turn = toy_stream("a", first, 10)
    loop.add(turn)
    run(loop)
    following = toy_stream("b", [*first, *turn.output, 7, 7], 1)
    loop.add(following)
    # 15 of the 16 old tokens were computed (the last was only sampled): three full blocks of four
    assert run(loop) == ["b:12+6*"]
    assert following.output == solo(following.prompt.tolist(), 1)


def test_a_prompt_waits_until_all_of_it_fits_beside_what_runs() -> None:
    loop = toy_loop(num_blocks=10, budget=64, depth=0)
    loop.add(toy_stream("a", prompt(1, 16), 3))  # four blocks, then a fifth
    loop.add(toy_stream("b", prompt(2, 24), 1))  # six: with one block in reserve it does not fit beside a
    assert run(loop) == ["a:0+16*", "a:16+1*", "a:17+1*", "b:0+24*"]


def test_the_youngest_gives_way_and_resumes_with_all_its_tokens() -> None:
    loop = toy_loop(num_blocks=8, budget=64, depth=1)
    old = toy_stream("old", prompt(11, 10), 16, arrival=0.0)
    young = toy_stream("young", prompt(12, 9), 16, arrival=1.0)
    assert len(solo(prompt(11, 10), 16)) == len(solo(prompt(12, 9), 16)) == 16
    loop.add(old)
    loop.add(young)
    run(loop)
    assert (old.request.preemptions, young.request.preemptions > 0) == (0, True)
    assert young.request.lost_tokens > 0
    assert old.output == solo(prompt(11, 10), 16)
    assert young.output == solo(prompt(12, 9), 16)
    loop.scheduler.check_integrity()


def test_a_higher_class_goes_first() -> None:
    loop = toy_loop(budget=8, depth=0)
    loop.add(toy_stream("later", prompt(1, 8), 1, priority=1, arrival=0.0))
    loop.add(toy_stream("first", prompt(2, 8), 1, priority=0, arrival=5.0))
    assert run(loop) == ["first:0+8*", "later:0+8*"]


@pytest.mark.parametrize("num_blocks", [9, 10])
@pytest.mark.parametrize("head_start", [4, 5, 6, 7])
def test_a_prefill_of_a_higher_class_takes_blocks_from_a_decode_of_the_same_step(
    num_blocks: int, head_start: int
) -> None:
    loop = toy_loop(num_blocks=num_blocks, budget=2, depth=1)
    low = toy_stream("low", next(p for i in range(100) if len(solo(p := prompt(i, 4), 28)) == 28), 28, priority=1)
    loop.add(low)
    for _ in range(head_start):
        loop.step()
    # One token a step beside the decode, which meanwhile grows into the blocks that the prefill counted on.
    urgent = toy_stream("urgent", prompt(8, 20), 2, priority=0, arrival=9.0)
    loop.add(urgent)
    run(loop)
    assert (low.request.preemptions > 0, urgent.request.preemptions) == (True, 0)
    for stream in (low, urgent):
        assert stream.output == solo(stream.prompt.tolist(), stream.request.max_tokens)
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_an_abort_at_any_moment_frees_everything(depth: int, steps: int) -> None:
    loop = toy_loop(budget=8, depth=depth)
    victim, other = toy_stream("victim", prompt(1, 30), 5), toy_stream("other", prompt(2, 10), 5)
    loop.add(victim)
    loop.add(other)
    for _ in range(steps):
        loop.step()
    loop.abort(victim)
    assert victim.request.state is State.FINISHED
    loop.scheduler.check_integrity()
    run(loop)
    assert other.output == solo(prompt(2, 10), 5)
    loop.scheduler.check_integrity()
    assert loop.scheduler.kv.block_pool.num_free == loop.scheduler.kv.block_pool.num_blocks


def test_a_seat_is_reused_while_its_old_slot_is_still_in_flight() -> None:
    loop = toy_loop(seqs=1, depth=1)
    ending = next(p for i in range(1000) if len(solo(p := prompt(i, 4), 30)) == 3)
    loop.add(toy_stream("a", ending, 30))
    loop.add(toy_stream("b", prompt(5, 4), 2, arrival=1.0))
    # a's end is noticed when its surplus fourth token is already in flight; b is seated in the very next step
    assert run(loop) == ["a:0+4*", "a:4+1*", "a:5+1*", "a:6+1*", "b:0+4*", "b:4+1*"]


def test_impossible_requests_are_refused_with_the_numbers() -> None:
    scheduler = toy_loop(num_blocks=4).scheduler
    with pytest.raises(RequestError, match="may grow to 18 tokens, but the KV cache holds 16"):
        scheduler.add(Request("a", prompt_tokens=10, max_tokens=8))
    scheduler.add(Request("b", prompt_tokens=10, max_tokens=7))  # the 17th token is sampled, not stored
    with pytest.raises(RequestError, match="the prompt is empty"):
        scheduler.add(Request("c", prompt_tokens=0, max_tokens=7))


def test_what_cannot_be_in_time_is_refused_before_anything_is_computed() -> None:
    loop = toy_loop(num_blocks=600, budget=64, depth=1)
    # A token takes a second; nothing else costs anything.
    loop.scheduler.policy = slo(CostModel(Coefficients(0, 0, 1.0, 0, 0, 0, 0), spread=0.0), 64)
    hopeless, fine = toy_stream("hopeless", prompt(1, 40), 2), toy_stream("fine", prompt(2, 40), 2)
    hopeless.request.ttft_target = 30.0
    for stream in (hopeless, fine):
        loop.add(stream)
    events = loop.step()
    assert [(event.sequence, event.token, event.finish_reason) for event in events] == [(hopeless, None, "refused")]
    assert hopeless.request.predicted_ttft is not None
    assert hopeless.request.predicted_ttft > 30.0
    run(loop)
    assert hopeless.output == []
    assert fine.output == solo(prompt(2, 40), 2)
    loop.scheduler.check_integrity()


def test_a_failed_step_ends_its_streams_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = toy_loop(depth=1)
    lost: Sequence = toy_stream("lost", prompt(1, 40), 5)
    loop.add(lost)
    loop.step()
    with monkeypatch.context() as patch:
        patch.setattr(ToyExecutor, "run", lambda *args: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            loop.step()
    assert lost.request.finish_reason == "error"
    assert not loop.has_work
    again = toy_stream("again", prompt(1, 40), 5)
    loop.add(again)
    run(loop)
    assert again.output == solo(prompt(1, 40), 5)
    assert again.request.cached_tokens == 0  # nothing of the failed step is believed
    loop.scheduler.check_integrity()
