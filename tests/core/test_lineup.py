"""The line-up is the order in which prompts are served, computed on arrays, and costs about the same for any queue."""

import sys
from collections import Counter, deque
from types import FrameType

from hypothesis import assume, given
from hypothesis import strategies as st

from weft.core import CostModel, Outcome, Request, Scheduler, Source, slo
from weft.core.forecast import PendingPrefill
from weft.core.lineup import line_up
from weft.core.queue import Levels, LineKey, WaitingQueue, line_of, order_key_of
from weft.core.tenants import INPUT_WEIGHT, Account
from weft.sim.profiles import load_profile

PROFILE = load_profile("h200-llama-3-8b")
TENANTS = "abc"


def one_by_one(requests: list[Request], now: float) -> list[Request]:
    """The same order by its definition: the next is the head of the line whose tenant was served least."""
    lines: dict[LineKey, deque[Request]] = {}
    for request in sorted(requests, key=order_key_of):
        lines.setdefault(line_of(request), deque()).append(request)
    levels = Levels([line[0] for line in lines.values()], now)
    service = {key.account: key.account.service for key in lines}

    def head(key: LineKey) -> tuple[object, ...]:
        request = lines[key][0]
        served = service[key.account] if request.service_at_start is None else request.service_at_start
        return key[:2], levels.of(request, served), request.order_key[3:], key

    order = []
    while lines:
        *_, key = min(head(key) for key in lines)
        assert isinstance(key, LineKey)
        request = lines[key].popleft()
        order.append(request)
        if request.service_at_start is None:
            service[key.account] += INPUT_WEIGHT * request.num_tokens / key.account.weight
        if not lines[key]:
            del lines[key]
    return order


drawn = st.tuples(
    st.sampled_from(TENANTS),
    st.booleans(),  # preempted, so that its tenant was charged for it
    st.integers(0, 2),  # precedence
    st.sampled_from([(False, 0), (False, 1), (True, 0)]),  # class
    st.integers(1, 40_000),  # tokens
    st.sampled_from(["queued", "started", "new"]),
)


@given(
    st.lists(drawn, min_size=1, max_size=40, unique_by=lambda one: one[4]),
    st.tuples(*[st.tuples(st.floats(0.5, 4), st.integers(0, 60_000), st.sampled_from([0.0, -60.0]))] * len(TENANTS)),
)
def test_the_order_is_that_of_service(
    ones: list[tuple[str, bool, int, tuple[bool, int], int, str]], tenants: tuple[tuple[float, int, float], ...]
) -> None:
    accounts = {
        name: Account(name, weight, float(service), since)
        for name, (weight, service, since) in zip(TENANTS, tenants, strict=True)
    }
    places: dict[str, list[Request]] = {"queued": [], "started": [], "new": []}
    for number, (tenant, charged, precedence, (flex, priority), tokens, where) in enumerate(ones):
        flex, priority = (False, 1) if where == "new" else (flex, priority)  # newcomers are of one class
        request = Request(f"{number:03d}", tokens, 10, tenant=tenant, tenant_account=accounts[tenant], flex=flex)
        request.priority, request.precedence = priority, precedence
        if where == "started" or (where == "queued" and charged):
            request.service_at_start = accounts[tenant].service / 2
        request.order_key = (flex, priority, precedence, float(tokens), 0.0, request.id)
        request.forecast_row = PendingPrefill(request, 0, tokens).pack()
        places[where].append(request)
    assume(places["new"])
    queue = WaitingQueue()
    for request in places["queued"]:
        queue.add(request)
    queue.check_integrity()
    found = line_up(queue, places["started"], places["new"], lambda request: request.forecast_row, now=0.0)
    everything = [*places["queued"], *places["started"], *places["new"]]
    order = [found.at(place) for place in range(len(found.order))]
    behind = [request for request in everything if request.order_key[:2] > (False, 1)]
    assert order == [request for request in one_by_one(everything, now=0.0) if request not in behind]
    assert [found.at(place) for place in found.newcomers] == [one for one in order if one in places["new"]]
    assert found.rows.remaining.tolist() == [request.num_tokens for request in order]
    fewer = found.without(found.newcomers[::2])
    gone = {found.at(place) for place in found.newcomers[::2]}
    assert [fewer.at(place) for place in range(len(fewer.order))] == [one for one in order if one not in gone]
    assert {fewer.at(place) for place in fewer.newcomers} == set(places["new"]) - gone


def calls_of_a_plan(queued: int, tenants: int, flex: bool) -> int:
    """Python calls that a plan makes which screens three newcomers, beside so many that wait."""
    policy = slo(CostModel(PROFILE.coefficients), 8192)
    scheduler = Scheduler(policy=policy, num_blocks=50_000, block_size=16, max_num_seqs=8)
    now = 0.0

    def request(name: str, flex: bool) -> Request:
        source = Source.DEFAULT
        wanted = {} if flex else {"ttft_target": 1.0, "gap_target": 0.025}
        tenant = f"tenant {len(scheduler.unscreened) % tenants}"
        return Request(name, 200, 400, now, tenant=tenant, flex=flex, ttft_source=source, gap_source=source, **wanted)

    def step() -> None:
        nonlocal now
        plan = scheduler.plan(now)
        if plan.batch is not None:
            started, now = now, now + (scheduler.steps_in_flight[-1].predicted or 0.0)
            scheduler.commit(plan.batch, Outcome(), started, now)

    for number in range(queued):
        scheduler.add(request(f"{number:06d}", flex))
    while scheduler.num_unscreened:
        step()
    for number in range(3):
        scheduler.add(request(f"new {number}", flex=False))
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        scheduler.plan(now)
    finally:
        sys.setprofile(None)
    assert scheduler.num_waiting >= queued - 8
    return calls["call"] + calls["c_call"]


def test_a_long_queue_costs_a_plan_no_more_calls_than_a_short_one() -> None:
    for tenants in (1, 3):
        for flex in (False, True):
            short, long = (calls_of_a_plan(queued, tenants, flex) for queued in (300, 6000))
            assert long < 1.3 * short, f"{long} calls instead of {short} with {tenants} tenants, flex {flex}"
