"""Events of /v1/responses, of pieces whose words are known."""

import json
from typing import Any

from tests.serve.test_choice import CALL, read
from weft.serve.output.choice import ChoiceDelta
from weft.serve.protocols.responses_bodies import ResponsesBody
from weft.serve.protocols.responses_formatter import ResponsesFormatter
from weft.text.tools import ToolCallDelta


def events(pieces: list[ChoiceDelta]) -> list[dict[str, Any]]:
    format = ResponsesFormatter("resp_1", "m", None, ResponsesBody(input="a"))
    choice, _ = read(CALL)
    data = b"".join(format.chunk(choice, piece, {}) for piece in pieces)
    return [json.loads(block.split(b"data: ")[1]) for block in data.strip().split(b"\n\n")]


def test_the_end_of_a_call_comes_before_the_text_behind_it() -> None:
    first = ChoiceDelta("", "", [ToolCallDelta(0, "call_1", "weather", '{"city": ')], 1, None, None)
    both = ChoiceDelta("Well.", "", [ToolCallDelta(0, None, None, '"Rome"}')], 2, None, "stop")
    items = [event["item"] for event in events([first, both]) if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["function_call", "message"]
    assert json.loads(items[0]["arguments"]) == {"city": "Rome"}
    assert items[1]["content"][0]["text"] == "Well."
