"""Order: the part of a policy that orders prefills."""

import math
from typing import Protocol

from weft.core.cost import CostModel
from weft.core.promises import Source
from weft.core.request import OrderKey, Request

USER_DELAY_S = 1.0  # seconds that a prompt is put back for each earlier prompt of the same user that waits
# Seconds that a request without a promised first token is put back in the order. A tenant that got no slice for so many
# seconds goes first.
QUEUE_PATIENCE_S = 10.0


class Order(Protocol):
    """How a policy orders prefills."""

    fair: bool  # whether the tenant with the least service goes first
    overtakes: bool  # whether a waiting request may go before a running prefill

    def key(self, request: Request) -> OrderKey:
        """Order key: class and precedence, then the order within them. It does not change while a request is queued."""
        ...


class ByArrival:
    """Class, then arrival."""

    fair = False
    overtakes = False

    def key(self, request: Request) -> OrderKey:
        # Precedence is ignored (0): it orders prompts within one tenant, but here all tenants share one line.
        return (request.flex, request.priority, 0, request.arrival, request.id)


class BySlack:
    """The request that must start soonest goes first. It must start at its due time minus its prefill time.

    This start time is fixed, so a request that waits is overtaken less and less. If a user sends many prompts at once,
    all but the first are put back for a limited time.
    """

    fair = True
    overtakes = True

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def key(self, request: Request) -> OrderKey:
        if request.due == math.inf:
            start = request.arrival + QUEUE_PATIENCE_S
        else:
            start = request.due - self.cost.prefill_seconds(0, request.num_tokens)
            if request.ttft_source is Source.DEFAULT:  # promised requests go first
                start += QUEUE_PATIENCE_S
        start += USER_DELAY_S * request.user_prompts_ahead
        return (request.flex, request.priority, request.precedence, start, request.arrival, request.id)
