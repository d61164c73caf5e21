"""litellm, with its OpenAI-compatible provider."""

import litellm
from tried import KEY, MODEL, ORDER, URL, WEATHER, run

litellm.telemetry = False
ALWAYS = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "max_tokens": 20, "num_retries": 0}
MESSAGES = [{"role": "user", "content": ORDER}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now", "parameters": WEATHER}}]


def chat() -> None:
    assert litellm.completion(messages=MESSAGES, **ALWAYS).choices[0].message.content


def chat_streamed() -> None:
    chunks = litellm.completion(messages=MESSAGES, stream=True, **ALWAYS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def tool() -> None:
    answer = litellm.completion(messages=MESSAGES, tools=TOOLS, tool_choice="required", **{**ALWAYS, "max_tokens": 96})
    assert answer.choices[0].message.tool_calls


async def asynchronous() -> None:
    assert (await litellm.acompletion(messages=MESSAGES, **ALWAYS)).choices[0].message.content


run(chat, chat_streamed, tool, asynchronous)
