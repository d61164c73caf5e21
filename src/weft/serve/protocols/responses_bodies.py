"""/v1/responses: the request body of OpenAI's newer API, for text, and its translation to a chat.

Here a conversation is complete. endpoints/responses_api/ stores what is kept between requests.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from weft.engine.params import MAX_LOGPROBS
from weft.errors import RequestError
from weft.serve.protocols.openai_bodies import ChatBody, Count, Json


class ResponsesBody(Struct, kw_only=True):
    input: str | list[Json] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    text: Json | None = None  # `format` has the required structure of the answer
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Json | None = None
    user: str | None = None
    service_tier: str | None = None
    truncation: str | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: Json | None = None

    @property
    def shows_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


def as_chat(body: ResponsesBody) -> ChatBody:
    """The same request as a chat."""
    messages: list[Json] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for item in body.input or ():
            _add(messages, item)
    if not messages:
        raise RequestError("input is empty: at least one message is needed")
    return ChatBody(
        messages=messages,
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=body.shows_logprobs,
        top_logprobs=body.top_logprobs if body.shows_logprobs else None,
        response_format=_format(body.text),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=_effort(body.reasoning),
        user=body.user,
        service_tier=body.service_tier,
        priority=body.priority,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _add(messages: list[Json], item: Json) -> None:
    """Adds one item of a conversation: as a new message, or to the last message."""
    match item.get("type", "message"):
        case "message":
            content = item.get("content")
            if isinstance(content, list):
                content = [_part(part) for part in content]
            messages.append({"role": item.get("role"), "content": content})
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            output = item.get("output")
            output = [_part(part) for part in output] if isinstance(output, list) else output
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning":
            pass  # earlier reasoning is not put into the prompt
        case kind:
            raise RequestError(f"input has an item of type {kind!r:.40}: only text and function calls are supported")


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text")}
    return part


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise RequestError(f"tools: a tool of type {tool.get('type')!r:.40} is not known here: only functions are")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | Json | None) -> str | Json | None:
    if isinstance(choice, dict) and choice.get("type") != "allowed_tools":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: Json | None) -> Json | None:
    wanted = (text or {}).get("format")
    if not isinstance(wanted, dict):
        return None
    if wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: wanted[name] for name in wanted if name != "type"}}
    return wanted


def _effort(reasoning: Json | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    return effort if isinstance(effort, str) else None
