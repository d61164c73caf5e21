"""The openai package: chats, completions, responses, tools, formats, log probabilities."""

from typing import Literal

from openai import OpenAI
from pydantic import BaseModel
from tried import KEY, MODEL, ORDER, URL, WEATHER, run

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": ORDER}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now", "parameters": WEATHER}}]


class Order(BaseModel):
    size: Literal["small", "large"]


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def chat_streamed() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


def completion() -> None:
    answer = client.completions.create(model=MODEL, prompt="The old house", max_tokens=8, logprobs=2, echo=True, n=2)
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs.tokens


def tool_forced() -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=64
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def tool_streamed() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=96, parallel_tool_calls=False
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls


def parsed() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Order, max_tokens=32)
    assert isinstance(answer.choices[0].message.parsed, Order)


def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, seed=1, temperature=0.5
    )
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3


def response() -> None:
    answer = client.responses.create(model=MODEL, input=ORDER, max_output_tokens=20)
    assert answer.output_text


def response_streamed() -> None:
    events = list(client.responses.create(model=MODEL, input=ORDER, max_output_tokens=20, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


run(
    *(chat, chat_streamed, completion, tool_forced, tool_streamed, parsed, logprobs),
    *(response, response_streamed, models),
)
