"""What requests may do to each other, and may not: found by review, kept by these."""

import math

import pytest

from tests.sim.drive import Drive, exact_scheduler, ttft
from weft.core import Outcome, Request


def crowd(count: int, prompt: int = 1000, output: int = 3000, **standing: object) -> list[Request]:
    return [Request(f"a{i:04d}", prompt, output, **standing) for i in range(count)]  # type: ignore[arg-type]


def people(count: int, start: float, every: float, ttft_target: float = 1.2) -> list[Request]:
    return [
        Request(f"p{i}", 800, 50, arrival=start + every * i, gap_target=0.05, ttft_target=ttft_target)
        for i in range(count)
    ]


@pytest.mark.parametrize("waiting", [150, 1000])
@pytest.mark.parametrize("flex", [True, False])
def test_those_who_are_promised_nothing_get_nobody_refused(waiting: int, flex: bool) -> None:
    many = crowd(waiting, 4000, 300, flex=flex, gap_target=math.inf if flex else 0.05)
    some = people(6, 1.0, 0.5)
    drive = Drive(exact_scheduler(), [*many, *some], horizon=6)
    assert drive.refused == []
    assert all(ttft(one) <= one.ttft_target for one in some)


@pytest.mark.parametrize(("tenant", "priority"), [("", 0), ("other", 0), ("", -1)])
def test_a_wish_for_a_tiny_gap_stops_nobody(tenant: str, priority: int) -> None:
    """It cannot run beside two hundred others, so it waits or is refused; it neither blocks nor displaces them."""
    many = crowd(200, gap_target=0.05)
    hasty = Request("x", 100, 50, arrival=8.0, gap_target=0.0075, ttft_target=2.0, tenant=tenant, priority=priority)
    some = people(5, 8.2, 0.1, ttft_target=2.5)
    drive = Drive(exact_scheduler(seqs=256), [*many, hasty, *some], horizon=12)
    assert drive.refused == ["x"]
    assert hasty.predicted_ttft is not None
    assert 2.0 < hasty.predicted_ttft < math.inf
    assert drive.preemptions == 0
    assert max(map(ttft, some)) < 0.2


def test_two_tenants_do_not_halve_each_other_s_pace() -> None:
    first = Request("a", 40_000, 2, tenant="a", gap_target=0.05, ttft_target=3.5)
    second = Request("b", 30_000, 2, arrival=0.05, tenant="b", gap_target=0.05, ttft_target=2.0)
    Drive(exact_scheduler(), [first, second])
    assert ttft(first) <= 3.5
    assert ttft(second) <= 2.0


def test_what_a_tenant_got_on_an_idle_device_is_not_held_against_it_later() -> None:
    long_answer = Request("l", 100, 9000, tenant="patient", gap_target=0.05)
    eager = [Request(f"e{i:03d}", 8000, 2, arrival=0.1 + 0.3 * i, tenant="eager") for i in range(60)]
    flood = [Request(f"f{i:03d}", 8000, 2, arrival=20.0 + 0.05 * i, tenant="flood") for i in range(200)]
    later = [Request(f"z{i}", 1000, 2, arrival=22.0 + i, tenant="eager") for i in range(5)]
    Drive(exact_scheduler(), [long_answer, *eager, *flood, *later], horizon=40)
    assert max(map(ttft, later)) < 2.0


def test_a_tenant_is_served_however_many_others_come_and_go() -> None:
    regular = [Request(f"r{i}", 4000, 2, arrival=0.1 * i, tenant="regular") for i in range(5)]
    others = [Request(f"n{i:04d}", 4000, 2, arrival=0.05 * i, tenant=f"new {i}") for i in range(1500)]
    Drive(exact_scheduler(), [*regular, *others], horizon=65)
    assert all(request.first_token is not None for request in regular), "somebody starves"


def test_promises_are_kept_where_tokens_bound_a_step() -> None:
    long = Request("long", 60_000, 2, gap_target=0.1, ttft_target=4.0)
    Drive(exact_scheduler(tokens=512), [long])
    assert long.finish_reason == "refused" or ttft(long) <= 4.0
    alone = Request("alone", 60_000, 2, gap_target=0.1, ttft_target=8.0)
    Drive(exact_scheduler(tokens=512), [alone])
    assert ttft(alone) <= 8.0


def test_a_moment_without_room_does_not_empty_the_queue() -> None:
    many = crowd(150, 1000, 700, gap_target=0.0135)  # their contexts grow until they fill the step
    patient = [Request(f"q{i}", 2000, 10, arrival=7.0, gap_target=0.0135, ttft_target=60.0) for i in range(20)]
    drive = Drive(exact_scheduler(seqs=400), [*many, *patient], horizon=120)
    assert drive.refused == []
    assert max(map(ttft, patient)) <= 60.0


def test_a_step_that_was_quicker_than_predicted_delays_nobody() -> None:
    scheduler = exact_scheduler()
    scheduler.add(Request("a", 12_000, 1, ttft_target=9.0))
    plan = scheduler.plan(0.0)
    assert plan.batch is not None
    assert (scheduler.steps_in_flight[-1].predicted or 0.0) > 0.2
    scheduler.commit(plan.batch, Outcome(), 0.0, 0.05)
    newcomer = Request("b", 10, 1, arrival=0.05, ttft_target=0.2)
    scheduler.add(newcomer)
    plan = scheduler.plan(0.05)
    assert plan.batch is not None
    assert not plan.refused


def test_victims_are_the_same_every_time() -> None:
    def victims(rubbish: int) -> list[int]:
        keep = [object() for _ in range(rubbish)]  # moves what is allocated next
        flex = [Request(f"b{i}", 100, 200, flex=True) for i in range(6)]
        some = [Request(f"p{i}", 100, 10, arrival=0.1, gap_target=0.05) for i in range(2)]
        Drive(exact_scheduler(seqs=6), [*flex, *some])
        assert len(keep) == rubbish
        return [request.preemptions for request in flex]

    assert len({tuple(victims(17 * n)) for n in range(20)}) == 1
