"""pydantic-ai: text, streams and typed results, through chat completions and through responses."""

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tried import KEY, MODEL, ORDER, URL, run

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
SETTINGS = {"max_tokens": 64}


class Order(BaseModel):
    size: Literal["small", "large"]


async def text() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=SETTINGS)
    assert (await agent.run(ORDER)).output


async def streamed() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=SETTINGS)
    async with agent.run_stream(ORDER) as stream:
        assert await stream.get_output()


async def typed_by_tool() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=Order, model_settings=SETTINGS)
    assert isinstance((await agent.run(ORDER)).output, Order)


async def typed_by_format() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=NativeOutput(Order), model_settings=SETTINGS)
    assert isinstance((await agent.run(ORDER)).output, Order)


async def by_responses() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=SETTINGS)
    assert (await agent.run(ORDER)).output


run(text, streamed, typed_by_tool, typed_by_format, by_responses)
