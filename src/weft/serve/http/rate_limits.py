"""RateLimits: limits per API key, for the number of requests at once and in a minute."""

import time
from collections import Counter, deque

from weft.serve.errors import ApiError


class RateLimits:
    """Limits per API key: concurrent requests, and requests per minute."""

    def __init__(self, per_minute: int | None, concurrent: int | None) -> None:
        self.per_minute, self.concurrent = per_minute, concurrent
        self.running: Counter[str] = Counter()
        self._recent: dict[str, deque[float]] = {}

    def enter(self, tenant: str) -> None:
        if self.concurrent is not None and self.running[tenant] >= self.concurrent:
            raise ApiError(
                429,
                f"{self.running[tenant]} requests of this key run already, which is all that may: wait for one to end",
                code="concurrency",
                retry_after=1,
            )
        if self.per_minute is not None:
            self._count(tenant, self.per_minute)
        self.running[tenant] += 1

    def leave(self, tenant: str) -> None:
        self.running[tenant] -= 1
        if not self.running[tenant]:
            del self.running[tenant]

    def _count(self, tenant: str, most: int) -> None:
        now = time.monotonic()
        recent = self._recent.setdefault(tenant, deque())
        while recent and recent[0] <= now - 60:
            recent.popleft()
        if len(recent) >= most:
            wait = recent[0] + 60 - now
            message = f"{most} requests of this key came within a minute, and no more may: try again in {wait:.0f} s"
            raise ApiError(429, message, code="rate_limit", retry_after=wait)
        recent.append(now)
