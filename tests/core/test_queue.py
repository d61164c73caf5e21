"""PrefillOrder: whose slice is next in the making of one plan."""

from weft.core.queue import PrefillOrder, WaitingQueue
from weft.core.request import Request, State
from weft.core.tenants import Tenants


def test_one_that_was_preempted_meanwhile_can_be_passed_over() -> None:
    """When the plan was begun, none of its line was in the queue."""
    account = Tenants(4, 64, {}).enter("", False, iter(()), 0.0)
    runs, victim = (
        Request(name, 4, 4, tenant_account=account, order_key=(False, 0, 0, arrival, name))
        for name, arrival in (("runs", 0.0), ("victim", 1.0))
    )
    runs.state = State.RUNNING
    queue = WaitingQueue()
    turns = PrefillOrder([runs], queue, overtakes=False, now=0.0)
    assert turns.next() is runs
    queue.add(victim)
    turns.served(runs)
    assert turns.next() is victim
    turns.pass_over(victim)
    assert turns.next() is None
