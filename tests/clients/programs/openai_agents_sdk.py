"""openai-agents: an agent with a tool, through chat completions and through responses."""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from openai import AsyncOpenAI
from tried import KEY, MODEL, ORDER, URL, run

disable_tracing(True)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


def model_of(kind: type) -> OpenAIChatCompletionsModel | OpenAIResponsesModel:
    return kind(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))


async def with_tool() -> None:
    settings = ModelSettings(max_tokens=96, tool_choice="required")
    agent = Agent("guide", model=model_of(OpenAIChatCompletionsModel), tools=[weather], model_settings=settings)
    assert (await Runner.run(agent, ORDER)).final_output is not None


async def with_tool_by_responses() -> None:
    settings = ModelSettings(max_tokens=96, tool_choice="required")
    agent = Agent("guide", model=model_of(OpenAIResponsesModel), tools=[weather], model_settings=settings)
    assert (await Runner.run(agent, ORDER)).final_output is not None


async def streamed() -> None:
    agent = Agent("guide", model=model_of(OpenAIChatCompletionsModel), model_settings=ModelSettings(max_tokens=20))
    result = Runner.run_streamed(agent, ORDER)
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds
    assert result.final_output


run(with_tool, with_tool_by_responses, streamed)
