"""What a client program has tried: each part runs, and the last line of the output says what became of it."""

import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL, KEY, MODEL = sys.argv[1:4]
ORDER = "A latte with oat milk, please."
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def run(*parts: Callable[[], Any]) -> None:
    """Runs all parts, also those behind one that fails. Coroutine functions get a loop each."""
    import asyncio

    found = {}
    for part in parts:
        try:
            result = part()
            if inspect.iscoroutine(result):
                asyncio.run(result)
            found[part.__name__] = ""
        except Exception as error:  # whatever a client raises is what is to be told
            traceback.print_exc()
            found[part.__name__] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps(found))
