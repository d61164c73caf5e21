"""Scripted schedules of `slo`: who goes first, how much a step carries, who gives way."""

import math
from typing import Any

import pytest

from tests.core.test_scheduler import prompt, run
from tests.toy import ToyExecutor, solo, toy_loop, toy_stream
from weft.core import Coefficients, CostModel, Request, Scheduler, StepBatch, chunked, slo
from weft.core.promises import Source
from weft.core.shape import StepShape, decodes_alone
from weft.core.tenants import Tenants
from weft.engine.executor import StepInputs, StepMasks, StepResult
from weft.engine.loop import Loop
from weft.errors import QueueFullError

TICK = 1 / 128  # seconds of a token (no rounding); nothing else costs anything, and the model knows it exactly
COST = Coefficients(fixed=0, weights=0, token=TICK, pair=0, slice=0, decode=0, context=0)


class Timed(ToyExecutor):
    """Its steps take exactly what the model says."""

    now = 0.0

    def run(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None) -> StepResult:
        result = super().run(batch, inputs, masks)
        result.started, self.now = self.now, self.now + COST.predict(batch.shape)
        result.finished = self.now
        return result


def slo_loop(*, tokens: int = 64, seqs: int = 8, blocks: int = 600) -> Loop:
    scheduler = Scheduler(
        policy=slo(CostModel(COST, spread=0.0), tokens), num_blocks=blocks, block_size=4, max_num_seqs=seqs
    )
    executor = Timed(scheduler.slots.size, blocks, 4)
    return Loop(scheduler, executor, depth=0, clock=lambda: executor.now)


def add(loop: Loop, name: str, length: int, max_tokens: int = 1, **standing: Any) -> Any:
    """Prompts that share nothing and do not end early. Targets are given in ticks."""
    standing = {key: value * TICK if key.endswith("target") else value for key, value in standing.items()}
    tags = (
        p for i in range(1000) if len(solo(p := prompt(i * 31 + sum(name.encode()), length), max_tokens)) == max_tokens
    )
    stream = toy_stream(name, next(tags), max_tokens, **standing)
    loop.add(stream)
    return stream


def test_a_prompt_gets_what_the_tightest_gap_leaves() -> None:
    loop = slo_loop()
    add(loop, "a", 3, 6, gap_target=5.0)
    add(loop, "b", 3, 3, gap_target=8.0)
    loop.step()
    add(loop, "long", 30)
    assert run(loop) == [
        "a:3+1* b:3+1* long:0+3",
        "a:4+1* b:4+1* long:3+3",
        "a:5+1* long:6+4",
        "a:6+1* long:10+4",
        "a:7+1* long:14+4",
        "long:18+12*",  # nobody waits for a token
    ]


def test_where_nobody_decodes_a_step_is_bounded_by_a_quarter_of_a_second_and_by_the_tokens() -> None:
    for tokens, first in ((64, 32), (20, 20)):
        loop = slo_loop(tokens=tokens)
        add(loop, "a", 60)
        assert run(loop)[0] == f"a:0+{first}"


def test_a_short_prompt_with_less_slack_passes_a_long_one_that_is_under_way() -> None:
    loop = slo_loop(tokens=10)
    add(loop, "decode", 2, 30, gap_target=10.0, ttft_target=50.0)
    add(loop, "long", 30, ttft_target=200.0)
    assert run(loop, steps=2) == ["decode:0+2* long:0+2", "decode:2+1* long:2+9"]
    add(loop, "short", 4, ttft_target=20.0, arrival=loop.clock())
    assert run(loop, steps=2) == ["decode:3+1* short:0+4* long:11+5", "decode:4+1* long:16+9"]


def test_several_prefills_share_a_step() -> None:
    loop = slo_loop(tokens=12)
    for name in "abc":
        add(loop, name, 5, ttft_target=100.0)
    assert run(loop) == ["a:0+5* b:0+5*", "c:0+5*"]  # no first token waits for more than another one's work


def test_a_prompt_does_not_start_when_the_decode_step_that_it_joins_would_break_a_promise() -> None:
    loop = slo_loop()
    for name in "abc":
        add(loop, name, 1, 4, gap_target=3.0)  # three decodes fill a step
    loop.step()
    loop.step()
    add(loop, "d", 2, 2)
    assert run(loop) == [
        "a:2+1* b:2+1* c:1+1*",
        "a:3+1* b:3+1* c:2+1*",
        "c:3+1* d:0+2*",
        "d:2+1*",
    ]


def test_flex_fills_the_slack_and_makes_room_when_somebody_comes() -> None:
    loop = slo_loop(seqs=2)
    add(loop, "x", 4, 4, flex=True)
    add(loop, "y", 4, 4, flex=True, arrival=1.0)
    loop.step()
    add(loop, "person", 4, 2, gap_target=4.0, arrival=2.0)  # both seats are taken
    assert run(loop) == [
        "x:4+1* person:0+4*",
        "x:5+1* person:4+1*",
        "x:6+1* y:4+1*",
        "y:5+1*",
        "y:6+1*",
    ]


def test_flex_decodes_respect_a_default_gap_target() -> None:
    """A flood of flex requests made steps of 300 ms beside a stream with the default target of 50."""
    loop = slo_loop()
    for number in range(6):
        add(loop, f"b{number}", 1, 9, flex=True, arrival=number * 0.01)
    loop.step()
    add(loop, "person", 2, 9, gap_target=8.0, gap_source=Source.DEFAULT, arrival=1.0)
    loop.step()
    beside = 0
    while any(request.id == "person" for request in loop.scheduler.running):
        shape = step_shape(loop)
        assert shape.decodes <= 4, "half of the default gap is for decodes"
        beside += shape.decodes > 1
    assert beside > 4, "flex requests fill the slack"
    run(loop)
    loop.scheduler.check_integrity()


def test_flex_prompts_do_not_make_a_default_gap_target_give_way() -> None:
    loop = slo_loop()
    add(loop, "person", 1, 60, gap_target=3.0, gap_source=Source.DEFAULT)
    loop.step()
    add(loop, "flex", 60, 1, flex=True)
    while loop.scheduler.num_waiting or len(loop.scheduler.running) > 1:
        assert step_shape(loop).tokens <= 3
    add(loop, "other", 60, 1)
    assert step_shape(loop).tokens > 3, "it gives way to other prompts"


def test_flex_gets_on_beside_a_stream_that_misses_its_default_gap_anyway() -> None:
    loop = slo_loop(seqs=16)
    for number in range(12):
        add(loop, f"p{number}", 1, 60, gap_target=2.0, gap_source=Source.DEFAULT)
    loop.step()
    flex = add(loop, "flex", 4, 8, flex=True)
    run(loop, steps=40)
    assert flex.request.finish_reason is not None


def step_shape(loop: Loop) -> StepShape:
    shapes: list[StepShape] = []
    loop.on_record = lambda record: shapes.append(record.shape)
    loop.step()
    return shapes[-1]


def test_a_request_without_a_promise_is_not_overtaken_for_ever() -> None:
    loop = slo_loop(tokens=4)
    add(loop, "patient", 4)
    served = []
    for number in range(400):  # each step takes four ticks and sees one more that is promised its first token soon
        add(loop, f"z{number:03d}", 4, arrival=loop.clock(), ttft_target=50.0)
        served += run(loop, steps=1)
    assert 10.0 - 0.5 <= served.index("patient:0+4*") * 4 * TICK <= 10.0


def test_the_tenant_that_was_served_least_goes_first() -> None:
    loop = slo_loop(tokens=8)
    for number in range(4):
        add(loop, f"h{number}", 8, tenant="heavy", arrival=number * 0.01, ttft_target=1000.0)
    assert run(loop, steps=1) == ["h0:0+8*"]
    add(loop, "light", 8, tenant="light", arrival=1.0, ttft_target=5000.0)  # far more slack
    add(loop, "middle", 8, tenant="light", arrival=2.0, ttft_target=5000.0)
    assert run(loop) == ["h1:0+8*", "light:0+8*", "h2:0+8*", "middle:0+8*", "h3:0+8*"]


def test_precedence_orders_a_tenants_own_prompts_and_nobody_elses() -> None:
    loop = slo_loop(tokens=8)
    add(loop, "a1", 8, tenant="a", arrival=0.0, ttft_target=1000.0)
    add(loop, "b1", 8, tenant="b", arrival=0.1, ttft_target=1000.0)
    add(loop, "b2", 8, tenant="b", arrival=0.2, ttft_target=1000.0, precedence=-5)
    add(loop, "a2", 8, tenant="a", arrival=0.3, ttft_target=1000.0, precedence=7)
    assert [served.partition(":")[0] for served in run(loop)] == ["a1", "b2", "b1", "a2"]


def test_a_noisy_machine_takes_as_many_as_keep_99_gaps_in_100() -> None:
    """A decode step of 20 ms within a gap of 50: with a spread of 0.3 it takes 40 ms at the 99th percentile."""
    cost = CostModel(Coefficients(0.02, 0, 0, 0, 0, 0, 0), spread=0.3)
    admission = slo(cost, 100).admission
    assert admission.fits_decode_step(decodes_alone(2, 100), 0.05)
    assert not admission.fits_decode_step(decodes_alone(2, 100), 0.04)


def test_a_users_prompts_make_room_for_those_of_other_users_of_the_tenant() -> None:
    loop = slo_loop(tokens=8)
    for number in range(4):
        add(loop, f"a{number}", 8, user="a", arrival=number * 0.01, ttft_target=1000.0)
    add(loop, "B0", 8, user="b", arrival=0.1, ttft_target=1000.0)
    add(loop, "C0", 8, arrival=1.5, ttft_target=1000.0)  # of nobody in particular
    add(loop, "B1", 8, user="b", arrival=1.6, ttft_target=1000.0)
    assert [served.partition(":")[0] for served in run(loop)] == ["a0", "B0", "a1", "C0", "a2", "B1", "a3"]
    loop.scheduler.check_integrity()


def test_a_user_is_not_put_back_for_flex_prompts_nor_for_completions_of_one_prompt() -> None:
    loop = slo_loop(tokens=8)
    for number in range(3):
        add(loop, f"x{number}", 8, user="a", arrival=number * 0.01, flex=True)
    add(loop, "a0", 8, user="a", arrival=0.1, ttft_target=1000.0)
    add(loop, "m1", 8, user="a", arrival=0.1, ttft_target=1000.0, sibling=True)
    add(loop, "B0", 8, user="b", arrival=0.2, ttft_target=1000.0)
    assert [served.partition(":")[0] for served in run(loop)][:3] == ["a0", "m1", "B0"]
    loop.scheduler.check_integrity()


def test_a_user_is_put_back_for_what_waits_and_not_for_what_has_started() -> None:
    loop = slo_loop(tokens=8)
    add(loop, "a0", 8, user="a", arrival=0.0, ttft_target=1000.0)
    assert run(loop, steps=1) == ["a0:0+8*"]
    gone = add(loop, "a1", 8, user="a", arrival=0.1, ttft_target=1000.0)
    loop.abort(gone)
    add(loop, "a2", 8, user="a", arrival=0.2, ttft_target=1000.0)
    add(loop, "b0", 8, user="b", arrival=0.3, ttft_target=1000.0)
    assert [served.partition(":")[0] for served in run(loop)] == ["a2", "b0"]
    loop.scheduler.check_integrity()


def test_a_share_bounds_the_seats_while_others_are_there() -> None:
    loop = slo_loop(tokens=16, seqs=4)
    for number in range(4):
        add(loop, f"h{number}", 2, 20, tenant="heavy", arrival=number * 0.01)
    loop.step()
    assert {request.tenant for request in loop.scheduler.running} == {"heavy"}
    add(loop, "k", 2, 5, tenant="light", arrival=1.0)
    add(loop, "l", 2, 5, tenant="light", arrival=1.1)
    add(loop, "m", 2, 5, tenant="light", arrival=1.2)
    loop.step()
    seats = sorted(request.tenant for request in loop.scheduler.running)
    assert seats == ["heavy", "heavy", "light", "light"]
    run(loop)
    loop.scheduler.check_integrity()


def test_a_share_follows_its_weight() -> None:
    tenants = Tenants(seats=10, blocks=100, weights={"gold": 4.0})
    gold, plain = tenants.enter("gold", False, ()), tenants.enter("plain", False, ())
    gold.seats, plain.seats = 8, 2
    assert not tenants.is_over(gold, flex=False)
    assert tenants.is_over(gold, flex=False, seats=1)
    assert tenants.is_over(plain, flex=False, seats=1)
    assert tenants.is_over(plain, flex=False, blocks=21)
    with pytest.raises(ValueError, match="the weight of tenant 'none' is 0"):
        Tenants(seats=10, blocks=100, weights={"none": 0.0})
    gold.charge(80)
    plain.charge(20)
    assert gold.service == plain.service


def test_being_away_earns_a_tenant_nothing() -> None:
    tenants = Tenants(seats=10, blocks=100, weights={})
    busy, idle = tenants.enter("busy", False, ()), tenants.enter("idle", False, ())
    tenants.leave(idle, False)
    busy.charge(1000)
    back = tenants.enter("idle", False, [busy.service])
    assert back.service == busy.service
    back.charge(500)
    tenants.leave(back, False)
    assert tenants.enter("idle", False, [busy.service]).service == 1500, "nor does leaving wipe out what it had"


def test_what_a_tenant_got_while_nobody_waited_is_not_held_against_it() -> None:
    tenants = Tenants(seats=10, blocks=100, weights={})
    patient, eager = tenants.enter("patient", False, ()), tenants.enter("eager", False, ())
    eager.charge(1e6)  # patient only decodes meanwhile
    assert tenants.enter("new", False, ()).service == eager.service
    assert patient.service == 0.0


def test_flex_of_another_tenant_does_not_halve_the_seats() -> None:
    loop = slo_loop(tokens=16, seqs=4)
    for number in range(4):
        add(loop, f"b{number}", 2, 20, tenant="other", flex=True, arrival=number * 0.01)
    loop.step()
    for number in range(4):
        add(loop, f"i{number}", 2, 5, tenant="people", arrival=1.0 + number * 0.01)
    loop.step()
    loop.step()
    assert {request.tenant for request in loop.scheduler.running} == {"people"}
    run(loop)
    loop.scheduler.check_integrity()


def test_the_one_whose_loss_costs_least_gives_way() -> None:
    loop = toy_loop(num_blocks=12, budget=64, depth=0)
    elder = add(loop, "elder", 8, 7, arrival=0.0)
    large = add(loop, "large", 20, 12, arrival=2.0)
    small = add(loop, "small", 8, 6, arrival=1.0)
    run(loop)
    # Age alone would have taken `large`, with more to compute anew.
    assert (elder.request.preemptions, large.request.preemptions, small.request.preemptions) == (0, 0, 1)
    assert small.request.lost_tokens > 0
    for stream in (elder, large, small):
        assert stream.output == solo(stream.prompt.tolist(), stream.request.max_tokens)


def test_what_preemption_lost_is_in_the_record() -> None:
    loop = toy_loop(num_blocks=8, budget=64, depth=1)
    records = []
    loop.on_record = records.append
    streams = [add(loop, "a", 10, 16, arrival=0.0), add(loop, "b", 9, 16, arrival=1.0)]
    run(loop)
    assert sum(record.lost_tokens for record in records) == sum(s.request.lost_tokens for s in streams) > 0


def test_a_full_queue_says_so_with_the_numbers() -> None:
    def queued(**limits: int) -> Scheduler:
        scheduler = Scheduler(policy=chunked(8), num_blocks=100, block_size=4, max_num_seqs=1, **limits)
        scheduler.add(Request("a", prompt_tokens=30, max_tokens=1))
        return scheduler

    full = queued(max_queued_requests=1)
    full.add(Request("b", prompt_tokens=1, max_tokens=1))  # the seat is for a, and b is the one that waits
    with pytest.raises(QueueFullError, match="1 requests wait already, max_queued_requests=1"):
        full.add(Request("c", prompt_tokens=1, max_tokens=1))
    with pytest.raises(
        QueueFullError, match=r"30 tokens of prompts wait already; with 11 more .* max_queued_tokens=40"
    ):
        queued(max_queued_tokens=40).add(Request("b", prompt_tokens=11, max_tokens=1))
    fits = queued(max_queued_requests=2, max_queued_tokens=40)
    fits.add(Request("b", prompt_tokens=10, max_tokens=1))
    fits.plan(0.0)  # takes eight tokens of a: it no longer waits
    fits.add(Request("c", prompt_tokens=30, max_tokens=1))
    fits.check_integrity()


def test_a_refusal_names_the_time_that_the_first_token_would_have_taken() -> None:
    loop = slo_loop()
    add(loop, "a", 40, ttft_target=50.0)
    late = add(loop, "b", 40, ttft_target=60.0)
    never = add(loop, "c", 40, gap_target=0.5, ttft_target=1e6)
    (event,) = loop.step()
    assert (event.sequence, event.finish_reason) == (late, "refused")
    assert late.request.predicted_ttft == pytest.approx(80 * TICK, rel=0.1)
    assert never.request.predicted_ttft is not None
    assert math.isfinite(never.request.predicted_ttft)


def test_a_refusal_is_not_lost_when_waiting_for_the_device_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = slo_loop()
    loop.depth = 1
    other = add(loop, "a", 200, 30)
    loop.step()
    late = add(loop, "b", 40, ttft_target=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Timed, "run", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    events = []
    while loop.has_work:
        events += loop.step()
    assert [event.finish_reason for event in events if event.sequence is late] == ["refused"]
    assert other.request.finish_reason == "length"


def test_who_is_seated_in_a_plan_that_comes_to_nothing_is_heard_of_with_the_next() -> None:
    """Its seat came from the only decode, whose gap still bounded the step: no plan, but it held cached blocks."""
    cost = Coefficients(0, 0, 1 / 128, 0, 0, 0, 0, reach=1 / 32)
    loop = toy_loop(policy=slo(CostModel(cost, spread=0.0), 64), seqs=1, depth=0)
    now = iter(range(10**6))
    loop.clock = lambda: float(next(now))
    shared = [1 + (i * 7 + 3) % 49 for i in range(60)]
    for name, words in (("warm", shared), ("other", [3, 3, 4])):
        loop.add(toy_stream(name, words, 1))
        run(loop)
    low = toy_stream("low", [5, 6, 7], 30, priority=1, gap_target=0.2, arrival=100.0)
    loop.add(low)
    run(loop, steps=2)
    tail = next([a, b] for a in range(1, 49) for b in range(1, 49) if len(solo([*shared, a, b], 6)) == 6)
    urgent = toy_stream("urgent", [*shared, *tail], 6, arrival=101.0)
    loop.add(urgent)
    run(loop)
    for stream in (low, urgent):
        assert stream.output == solo(stream.prompt.tolist(), stream.request.max_tokens)


def test_an_idle_engine_takes_a_prompt_of_any_length() -> None:
    scheduler = Scheduler(policy=chunked(8), num_blocks=100, block_size=4, max_num_seqs=4, max_queued_tokens=10)
    scheduler.add(Request("long", prompt_tokens=300, max_tokens=1))
    with pytest.raises(QueueFullError):
        scheduler.add(Request("short", prompt_tokens=1, max_tokens=1))


def test_an_idle_engine_refuses_nobody_for_the_noise_of_the_past() -> None:
    """Who serves nobody learns nothing: with a margin that leaves no room at all it would refuse everybody for ever."""
    loop = slo_loop()
    assert loop.scheduler.policy.cost is not None
    loop.scheduler.policy.cost.decode.spread = loop.scheduler.policy.cost.prefill.spread = 2.0
    stream = add(loop, "first", 8, 4, gap_target=20.0, ttft_target=5000.0)
    run(loop)
    assert stream.request.finish_reason == "length"


def crowded_loop(*, turnover: bool) -> Loop:
    """Memory for 160 tokens, of which one who writes for long has 120; with `turnover`, short ones came and went."""
    loop = slo_loop(blocks=40)
    add(loop, "writes", 116, 40, gap_target=8.0)
    run(loop, steps=8)
    for number in range(10 if turnover else 0):
        add(loop, f"short{number}", 5, 1)
        run(loop, steps=1)
    return loop


def test_who_would_wait_for_memory_beyond_its_promise_is_refused_at_once() -> None:
    """The short ones gave back 8 tokens each, less one that was written meanwhile, in 6 ticks."""
    loop = crowded_loop(turnover=True)
    hurried = add(loop, "hurried", 60, 2, ttft_target=90.0, arrival=loop.clock())  # its own work takes 70
    patient = add(loop, "patient", 60, 2, ttft_target=400.0, arrival=loop.clock())
    loop.step()
    assert hurried.request.finish_reason == "refused"
    assert hurried.request.predicted_ttft > 90 * TICK
    assert patient.request.finish_reason is None
    run(loop)
    assert patient.request.first_token - patient.request.arrival <= 400 * TICK


@pytest.mark.parametrize("case", ["nothing is known", "it takes the place of others", "one prompt, many completions"])
def test_nobody_is_refused_for_memory_that_it_may_not_lack(case: str) -> None:
    loop = crowded_loop(turnover=case != "nothing is known")
    if case == "it takes the place of others":
        add(loop, "other", 3, 30, tenant="other", arrival=loop.clock())
        run(loop, steps=1)
    sibling = case == "one prompt, many completions"
    hurried = add(loop, "hurried", 60, 2, ttft_target=90.0, arrival=loop.clock(), sibling=sibling)
    loop.step()
    assert hurried.request.finish_reason is None


def test_nobody_is_refused_for_a_seat_that_comes_free_in_time() -> None:
    loop = slo_loop(seqs=2)
    add(loop, "short", 2, 10, gap_target=8.0)
    add(loop, "long", 2, 300, gap_target=8.0)
    run(loop, steps=2)
    hopeful = add(loop, "hopeful", 4, ttft_target=120.0, arrival=loop.clock())
    run(loop)
    assert hopeful.request.finish_reason == "length"
    assert hopeful.request.first_token - hopeful.request.arrival <= 120 * TICK
