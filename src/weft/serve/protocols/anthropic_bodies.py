"""/v1/messages: the request bodies of Anthropic's API, and their translation to chats. Nothing is stored."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from weft.engine.params import MAX_COUNT
from weft.errors import RequestError
from weft.serve.engines.messages import EngineInfo
from weft.serve.protocols.anthropic_formatter import MessagesFormatter
from weft.serve.protocols.openai_bodies import ChatBody, Count, Json, Stop, TokenizeBody, Whole
from weft.serve.requests.parsed_request import ParsedRequest
from weft.serve.requests.request_context import RequestContext
from weft.serve.requests.request_parser import RequestParser

# Start of Claude Code's first system block: billing data for Anthropic, with a hash that changes with every request. At
# the start of the prompt, it would prevent every prefix cache hit.
BILLING = "x-anthropic-billing-header"
EFFORTS = {"xhigh": "high", "max": "high"}  # chat templates only know low, medium and high


class Thinking(Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None  # not enforced: max_tokens limits reasoning and answer together
    display: str | None = None  # "omitted": thinking blocks have no text


class Metadata(Struct):
    user_id: str | None = None


class OutputConfig(Struct):
    effort: str | None = None
    format: Json | None = None  # the required structure of the answer


class CountTokensBody(Struct, kw_only=True):
    """The fields that determine the prompt."""

    messages: list[Json]
    model: str | None = None
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Json | None = None  # the older name of output_config.format
    mcp_servers: list[Json] | None = None  # not supported, and would change the answer: an error
    context_management: Json | None = None  # which old content to drop: ignored, nothing is dropped
    chat_template_kwargs: Json | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=64)] | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    priority: Whole | None = None
    cache_salt: str | None = None


async def parse_message(
    parser: RequestParser, body: MessagesBody, context: RequestContext, info: EngineInfo
) -> ParsedRequest:
    """A chat request with Anthropic's answer format. `max_tokens` may exceed the context: it is then lowered."""
    formatter = MessagesFormatter(
        f"msg_{context.response_id}", parser.model, body.max_tokens, body.service_tier, _omits(body)
    )
    template = parser.texts.template
    chat = await parser.texts.run_offloaded(context.size, lambda: as_chat(body, template.takes_late_system))
    parsed = await parser.parse_chat(chat, context, info, formatter, fits=True)
    parsed.usage_in_last_chunk = parsed.usage_in_first_chunk = True  # usage in the last and in the first event
    return parsed


async def count_tokens(parser: RequestParser, body: CountTokensBody, size: int) -> int:
    """Number of tokens of the prompt. `size` is the body's size in bytes, as in RequestContext."""
    template = parser.texts.template
    prompt = await parser.texts.run_offloaded(size, lambda: as_prompt(body, template.takes_late_system))
    return len(await parser.prompt_reader.chat_token_ids(prompt, size))


def as_prompt(body: CountTokensBody, late_system: bool = True) -> TokenizeBody:
    """The prompt as messages for the chat template.

    `late_system`: whether the template accepts a system message after other messages.
    """
    if body.mcp_servers:
        raise RequestError("mcp_servers: this server connects to no MCP server: leave them out")
    messages = _conversation(body, "system" if late_system else "user")
    return TokenizeBody(
        messages=messages,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        continue_final_message=messages[-1]["role"] == "assistant",
        chat_template_kwargs=_template_options(body),
    )


def as_chat(body: MessagesBody, late_system: bool = True) -> ChatBody:
    """The same request as a chat. `late_system` is as in `as_prompt`."""
    if "" in (body.stop_sequences or ()):
        raise RequestError("stop_sequences has an empty text in it: leave that out")
    prompt = as_prompt(body, late_system)
    choice = body.tool_choice or {}
    return ChatBody(
        messages=prompt.messages or [],
        tools=prompt.tools,
        continue_final_message=prompt.continue_final_message,
        chat_template_kwargs=prompt.chat_template_kwargs,
        tool_choice=_tool_choice(choice, bool(prompt.tools)),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        response_format=_response_format(body),
        model=body.model,
        stream=body.stream,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
        user=body.metadata.user_id if body.metadata is not None else None,
        service_tier=body.service_tier,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def _conversation(body: CountTokensBody, late_role: str) -> list[Json]:
    """Messages in the format of chat templates. Adjacent messages of the same role are merged, as at Anthropic.

    Until the end of this function `content` is a list: appending to one long string would copy it each time.
    """
    chat: list[Json] = []
    if texts := _texts(body.system, "system") if body.system else []:
        chat.append({"role": "system", "content": texts})
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        match message.get("role"):
            case "user":
                _add_user(chat, _blocks(message.get("content"), where), where)
            case "assistant":
                _add_assistant(chat, _blocks(message.get("content"), where), where)
            case "system":
                _add_text(chat, late_role, _texts(message.get("content"), where))
            case role:
                raise RequestError(f"{where}: the role {role!r:.40} is unknown: choose user, assistant or system")
    if not body.messages or not chat:
        raise RequestError("messages is empty: at least one message is needed")
    if chat[-1].get("tool_calls"):
        raise RequestError("messages: the last one calls a tool: send the tool_result as a message of the user")
    for message in chat:
        texts = message["content"]
        message["content"] = "\n".join(texts) if texts or "tool_calls" not in message else None
    return chat


def _add_text(chat: list[Json], role: str, texts: list[str]) -> None:
    if chat and chat[-1]["role"] == role:
        chat[-1]["content"] += texts
    else:
        chat.append({"role": role, "content": texts})


def _add_user(chat: list[Json], blocks: list[Json], where: str) -> None:
    for block in blocks:
        match block.get("type"):
            case "text":
                _add_text(chat, "user", [_text(block, where)])
            case "tool_result":
                id = block.get("tool_use_id")
                if not isinstance(id, str):
                    raise RequestError(f"{where}: a tool_result needs a tool_use_id, the id of the call")
                texts = _texts(block.get("content"), where)
                if block.get("is_error") is True and not "".join(texts[:1]).startswith("Error"):
                    texts = [f"Error: {''.join(texts[:1])}", *texts[1:]]  # chat messages have no error flag
                chat.append({"role": "tool", "tool_call_id": id, "content": texts})
            case kind:
                raise _unreadable(kind, where)


def _add_assistant(chat: list[Json], blocks: list[Json], where: str) -> None:
    for block in blocks:
        match block.get("type"):
            case "text":
                _add_text(chat, "assistant", [_text(block, where)])
            case "tool_use":
                name, id, input = block.get("name"), block.get("id"), block.get("input", {})
                if not isinstance(name, str) or not isinstance(id, str) or not isinstance(input, dict):
                    raise RequestError(f"{where}: a tool_use needs an id, a name and an input, which is an object")
                _add_text(chat, "assistant", [])
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": input}}
                chat[-1].setdefault("tool_calls", []).append(call)
            case "thinking" | "redacted_thinking":
                pass  # earlier reasoning is not put into the prompt
            case kind:
                raise _unreadable(kind, where)


def _blocks(content: Any, where: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return content
    raise RequestError(f"{where}: the content must be text or a list of blocks, not {content!r:.60}")


def _texts(content: Any, where: str) -> list[str]:
    """The texts of content that may only have text blocks. Billing data is dropped."""
    found = []
    for block in _blocks("" if content is None else content, where):
        if block.get("type") != "text":
            raise _unreadable(block.get("type"), where)
        if not (text := _text(block, where)).startswith(BILLING):
            found.append(text)
    return found


def _text(block: Json, where: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}: a block of type text needs a text, not {text!r:.60}")
    return text


def _unreadable(kind: Any, where: str) -> RequestError:
    return RequestError(
        f"{where}: a block of type {kind!r:.60} cannot be read here: leave it out (text, tool_use and tool_result can)"
    )


def _tool(tool: Json) -> Json:
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if kind not in (None, "custom"):
        raise RequestError(
            f"tools: {kind!r:.60} is a tool of Anthropic's servers, and this server does not have it: leave it out"
        )
    if not isinstance(schema, dict):
        raise RequestError(f"tools: {name!r:.60} needs an input_schema, which is a JSON schema")
    function = {"name": name, "parameters": schema}
    if isinstance(about := tool.get("description"), str):
        function["description"] = about
    return {"type": "function", "function": function}


def _tool_choice(choice: Json, has_tools: bool) -> str | Json | None:
    match choice.get("type"):
        case None if not choice:
            return None
        case "auto" | "none" as kind:
            return str(kind)
        case "any" if has_tools:
            return "required"
        case "any":
            raise RequestError("tool_choice: any needs tools to choose from")
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case kind:
            raise RequestError(f"tool_choice: type {kind!r:.40} is unknown: choose auto, any, tool or none")


def _template_options(body: CountTokensBody) -> Json | None:
    """Chat template options that control how much the model thinks."""
    options: Json = {}
    if body.thinking is not None:
        options["enable_thinking"] = body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None and options.get("enable_thinking") is not False:
        options["reasoning_effort"] = EFFORTS.get(effort, effort)
    return {**options, **(body.chat_template_kwargs or {})} or None


def _response_format(body: CountTokensBody) -> Json | None:
    newer = body.output_config.format if body.output_config is not None else None
    wanted = body.output_format if newer is None else newer
    if wanted is None:
        return None
    kind, schema = wanted.get("type"), wanted.get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestError("output_config: the format must be an object with the type json_schema and a schema")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _omits(body: MessagesBody) -> bool:
    """Whether the answer's thinking blocks have no text."""
    return body.thinking is not None and body.thinking.display == "omitted"
