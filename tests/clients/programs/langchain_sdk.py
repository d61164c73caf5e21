"""langchain-openai: messages, streams, tools, structured output."""

from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from tried import KEY, MODEL, ORDER, URL, run

model = ChatOpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=64, max_retries=0)


class Order(BaseModel):
    """What a guest wants."""

    size: Literal["small", "large"]


def invoke() -> None:
    assert model.invoke(ORDER).content


def streamed() -> None:
    assert "".join(chunk.content for chunk in model.stream(ORDER))


def tool() -> None:
    answer = model.bind_tools([Order], tool_choice="Order").invoke(ORDER)
    assert answer.tool_calls[0]["name"] == "Order"


def structured() -> None:
    assert isinstance(model.with_structured_output(Order, method="json_schema").invoke(ORDER), Order)


def batch() -> None:
    assert len(model.batch([ORDER] * 4)) == 4


run(invoke, streamed, tool, structured, batch)
