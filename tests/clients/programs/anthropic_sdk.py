"""The anthropic package: messages, streamed and whole, tools, counting."""

from anthropic import Anthropic
from tried import KEY, MODEL, ORDER, URL, WEATHER, run

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": ORDER}]
TOOLS = [{"name": "weather", "description": "Now", "input_schema": WEATHER}]


def message() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=20, messages=MESSAGES, system="You are a barista.")
    assert answer.content[0].text
    assert answer.usage.input_tokens > 0


def message_streamed() -> None:
    with client.messages.stream(model=MODEL, max_tokens=20, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text
    assert final.stop_reason in ("end_turn", "max_tokens")


def tool_and_result() -> None:
    choice = {"type": "tool", "name": "weather"}
    answer = client.messages.create(model=MODEL, max_tokens=64, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(model=MODEL, max_tokens=10, messages=messages, tools=TOOLS)
    assert again.usage.output_tokens > 0


def count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0


run(message, message_streamed, tool_and_result, count_tokens)
