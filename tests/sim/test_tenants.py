"""Many clients of one tenant beside one of another, in closed loops on a virtual clock with exact step times."""

import heapq
from typing import NamedTuple

import numpy as np
import pytest

from weft.core import CostModel, Outcome, Plan, Request, Scheduler, Source, slo
from weft.core.coefficients import Coefficients

COST = Coefficients(0.004, 0.004, 1.5e-4, 2e-9, 1e-5, 3e-4, 1e-8)  # a small model on two cores
SECONDS = 20.0
RETRY = 0.2  # seconds after which a refused client tries again


class Client(NamedTuple):
    free: float  # seconds: when it sends its next request
    number: int
    tenant: str


class Tally:
    def __init__(self) -> None:
        self.refused = 0
        self.ttfts: list[float] = []


def closed_loops(clients: dict[str, int], seats: int, ttft: float, max_tokens: int) -> dict[str, Tally]:
    """What each tenant got; the last tenant's clients begin a second later than the others'."""
    random = np.random.default_rng(0)
    scheduler = Scheduler(policy=slo(CostModel(COST), 2048), num_blocks=16_384, block_size=16, max_num_seqs=seats)
    late = list(clients)[-1]
    waiting = [Client(float(name == late), number, name) for name, count in clients.items() for number in range(count)]
    heapq.heapify(waiting)
    tallies, owner = {name: Tally() for name in clients}, dict[Request, Client]()
    in_flight: list[tuple[Plan, float, float]] = []
    now = device_free = 0.0
    while now < SECONDS:
        while waiting and waiting[0].free <= now:
            client = heapq.heappop(waiting)
            request = Request(
                f"{len(owner)}-{client.number}-{now}",
                int(random.uniform(100, 300)),
                max_tokens,
                arrival=client.free,
                tenant=client.tenant,
                ttft_target=ttft,
                gap_target=ttft / 20,
                ttft_source=Source.OPERATOR,
                gap_source=Source.OPERATOR,
            )
            owner[request] = client
            scheduler.add(request)
        plan = scheduler.plan(now)
        for request in plan.refused:
            client = owner.pop(request)
            tallies[client.tenant].refused += 1
            heapq.heappush(waiting, client._replace(free=now + RETRY))
        if plan.batch is not None:
            started = max(now, device_free)
            device_free = started + COST.predict(plan.batch.shape)
            in_flight.append((plan, started, device_free))
        if in_flight and (len(in_flight) > 1 or plan.batch is None):
            done, started, finished = in_flight.pop(0)
            now = max(now, finished)
            assert done.batch is not None
            requests = scheduler.steps_in_flight[0].requests
            ended = [requests[row] for row in np.flatnonzero(done.may_be_last).tolist()]
            outcome = Outcome(finished=[(request, "length") for request in ended])
            scheduler.commit(done.batch, outcome, started, finished)
            for request in ended:
                client = owner.pop(request)
                assert request.first_token is not None
                tallies[client.tenant].ttfts.append(request.first_token - request.arrival)
                heapq.heappush(waiting, client._replace(free=now))
        elif plan.batch is None:
            now = waiting[0].free
    return tallies


@pytest.mark.parametrize("seats", [16, 256])
@pytest.mark.parametrize("max_tokens", [40, 400])
@pytest.mark.parametrize("ttft", [1.0, 2.0])
def test_none_of_one_tenants_requests_is_refused_beside_sixty_clients_of_another(
    seats: int, max_tokens: int, ttft: float
) -> None:
    found = closed_loops({"many": 60, "one": 1}, seats, ttft, max_tokens)
    assert found["many"].refused > 0, "the many ask for more than there is"
    assert found["one"].refused == 0
    assert len(found["one"].ttfts) >= 1
    assert max(found["one"].ttfts) < ttft / 2, "it does not queue behind them"


def test_of_two_equal_tenants_both_are_refused_alike() -> None:
    found = closed_loops({"a": 40, "b": 40}, 64, 1.0, 40)
    served = {name: len(one.ttfts) for name, one in found.items()}
    assert min(served.values()) > 0.6 * max(served.values()), served
