"""Processes that compile schemas are used again, also where several forms come at once."""

import asyncio
from types import SimpleNamespace
from typing import Any

from weft.engine.params import StructuredOutputs
from weft.serve.requests.structure_checker import StructureChecker, StructureCheckResult, _encode


class Counted(StructureChecker):
    """Its processes are pretended: each takes a while to start and to answer, and finds everything good."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    async def _start(self) -> Any:
        self.started += 1
        await asyncio.sleep(0.02)

        async def readline() -> bytes:
            await asyncio.sleep(0.01)
            return _encode(StructureCheckResult(None)) + b"\n"

        stdin, stdout = SimpleNamespace(write=lambda data: None), SimpleNamespace(readline=readline)
        return SimpleNamespace(stdin=stdin, stdout=stdout, returncode=None)


def test_a_process_that_is_free_again_is_not_forgotten() -> None:
    async def main() -> int:
        checker = Counted()
        await checker.prepare()
        for number in range(3):  # the first of a pair finds a process, and is done while another is started
            forms = [StructuredOutputs(regex=f"{number}{letter}") for letter in "ab"]
            await asyncio.gather(*map(checker.check, forms))
        return checker.started

    assert asyncio.run(main()) == 2
