"""instructor: typed answers, by tools and by JSON schema."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel
from tried import KEY, MODEL, ORDER, URL, run

openai = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
ALWAYS = {"model": MODEL, "messages": [{"role": "user", "content": ORDER}], "max_tokens": 96, "max_retries": 0}


class Order(BaseModel):
    size: Literal["small", "large"]


def by_tools() -> None:
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    assert isinstance(client.chat.completions.create(response_model=Order, **ALWAYS), Order)


def by_schema() -> None:
    client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(client.chat.completions.create(response_model=Order, **ALWAYS), Order)


run(by_tools, by_schema)
