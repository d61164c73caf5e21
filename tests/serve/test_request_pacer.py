"""A burst of requests is read one at a time, and what else the event loop has to do comes in between."""

import asyncio
from itertools import pairwise

from weft.serve.http.request_pacer import RequestPacer


def test_other_work_gets_on_between_the_turns_of_a_burst() -> None:
    log: list[str] = []

    async def read(turns: RequestPacer, number: int) -> None:
        await turns.wait()
        log.append(f"read {number}")

    async def hand_out_tokens() -> None:
        while len(log) < 20:
            log.append("token")
            await asyncio.sleep(0)

    async def main() -> None:
        turns = RequestPacer()
        await asyncio.gather(hand_out_tokens(), *(read(turns, number) for number in range(8)))

    asyncio.run(main())
    reads = [place for place, entry in enumerate(log) if entry.startswith("read")]
    assert [log[place] for place in reads] == [f"read {number}" for number in range(8)]
    assert all(later - earlier > 1 for earlier, later in pairwise(reads)), log


def test_a_client_that_leaves_does_not_keep_the_others_waiting() -> None:
    async def main() -> list[int]:
        turns, read = RequestPacer(), []

        async def take(number: int) -> None:
            await turns.wait()
            read.append(number)

        tasks = [asyncio.create_task(take(number)) for number in range(6)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await take(6)
        return read

    assert asyncio.run(main()) == [0, 4, 5, 6]
