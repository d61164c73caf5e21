"""ToolChoice: the functions that a chat may or must call, and the structure that this requires of the reply."""

from typing import Any, NamedTuple

from weft.engine.params import Calls, StructuredOutputs
from weft.errors import RequestError
from weft.serve.output.choice import NamedToolCallParser, RequiredToolCallsParser
from weft.serve.protocols.openai_bodies import ChatBody, Json
from weft.text.tools import ToolParser, make_tool_parser

MOST_CALLS = 8  # most tool calls in one reply, if the reply must be tool calls


class ToolChoice(NamedTuple):
    """The functions that a chat may call, and whether it must."""

    shown: list[Json] | None  # tools in the prompt
    choice: str  # "none", "auto", "required" or "named"
    schemas: list[tuple[str, Json]]  # name and parameters of each function that may be called
    parallel: bool
    legacy: bool = False  # the request has `functions`, so the answer has `function_call`

    @classmethod
    def of(cls, body: ChatBody) -> "ToolChoice":
        if body.functions is not None or body.function_call is not None:
            return cls._of_functions(body)
        shown = body.tools or []
        schemas = [_function(tool) for tool in shown]
        choice: Any = body.tool_choice if body.tool_choice is not None else ("auto" if schemas else "none")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice, names = _allowed(choice, [name for name, _ in schemas])
            shown = [tool for tool, (name, _) in zip(shown, schemas, strict=True) if name in names]
            schemas = [schema for schema in schemas if schema[0] in names]
        elif isinstance(choice, dict):
            choice, schemas = "named", [_named(choice.get("function"), schemas, "tool_choice")]
        elif choice not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice={choice!r:.60} is unknown: choose none, auto, required, a function or allowed_tools"
            )
        if choice == "required" and not schemas:
            raise RequestError("tool_choice=required needs tools to choose from")
        return cls(shown or None, choice, schemas, body.parallel_tool_calls is not False)

    @classmethod
    def _of_functions(cls, body: ChatBody) -> "ToolChoice":
        """Tools from the older fields functions and function_call. A reply then has at most one call."""
        if body.tools is not None or body.tool_choice is not None:
            raise RequestError("functions: the older form of tools cannot stand beside tools; give one of them")
        shown = [{"type": "function", "function": function} for function in body.functions or []]
        schemas = [_function(tool) for tool in shown]
        choice: Any = body.function_call if body.function_call is not None else ("auto" if schemas else "none")
        if isinstance(choice, dict):
            choice, schemas = "named", [_named(choice, schemas, "function_call")]
        elif choice not in ("none", "auto"):
            raise RequestError(f"function_call={choice!r:.60} is unknown: choose none, auto or a function")
        return cls(shown or None, choice, schemas, parallel=False, legacy=True)

    def structure(self) -> StructuredOutputs | None:
        """The structure of a reply that must be a tool call; None if it need not be."""
        if self.choice == "named":
            return StructuredOutputs(json={**self.schemas[0][1], **_GUIDANCE})
        if self.choice == "required":
            most = MOST_CALLS if self.parallel else 1
            return StructuredOutputs(json={**self._list("arguments", most), **_GUIDANCE})
        return None

    def calls(self, own: str | None, template: str) -> Calls | None:
        """The grammar of optional tool calls in the model's format `own`, as an alternative to another structure."""
        if self.choice != "auto" or not self.schemas or own is None:
            return None
        if own == "hermes":
            return Calls({**self._one("arguments"), **_LENIENT}, "<tool_call>", "</tool_call>", self.parallel)
        if own == "llama3_json":
            return Calls({**self._one("parameters"), **_LENIENT})
        if own == "mistral" and "[ARGS]" not in template:  # does not fit models that write NAME[ARGS]{...}
            most = MOST_CALLS if self.parallel else 1
            return Calls({**self._list("arguments", most), **_LENIENT}, "[TOOL_CALLS]")
        return None

    def _list(self, arguments: str, most: int) -> Json:
        """The JSON schema of a list of tool calls."""
        one = self._one(arguments)
        defs = one.pop("$defs")
        return {"type": "array", "items": one, "minItems": 1, "maxItems": most, "$defs": defs}

    def _one(self, arguments: str) -> Json:
        """The JSON schema of one tool call. `arguments` is the key of its arguments."""
        # Each tool's schema is a separate definition, so that its references stay inside it.
        references = [f"#/$defs/{number}" for number in range(len(self.schemas))]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, arguments: {"$ref": reference}},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for (name, _), reference in zip(self.schemas, references, strict=True)
        ]
        defs = {
            str(number): _moved(schema, reference)
            for number, ((_, schema), reference) in enumerate(zip(self.schemas, references, strict=True))
        }
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": defs}

    def parser(self, own: str | None) -> ToolParser | NamedToolCallParser | RequiredToolCallsParser | None:
        """The parser for tool calls in the reply. `own` is the model's tool call format."""
        if self.choice == "named":
            return NamedToolCallParser(self.schemas[0][0])
        if self.choice == "required":
            return RequiredToolCallsParser()
        if self.choice == "auto" and self.schemas and own is not None:
            return make_tool_parser(own, [name for name, _ in self.schemas])
        return None


def _named(choice: Any, schemas: list[tuple[str, Json]], field: str) -> tuple[str, Json]:
    """The given function that a tool choice names."""
    name = choice.get("name") if isinstance(choice, dict) else None
    for schema in schemas:
        if schema[0] == name:
            return schema
    raise RequestError(f"{field} names the function {name!r:.60}, which is not among the tools")


def _allowed(choice: Json, known: list[str]) -> tuple[str, set[str]]:
    """The mode and the function names of an allowed_tools choice, in the format of chats or of /v1/responses."""
    allowed = choice.get("allowed_tools", choice)
    allowed = allowed if isinstance(allowed, dict) else {}
    mode, tools = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(f"tool_choice: allowed_tools has the mode {mode!r:.60}: choose auto or required")
    if not isinstance(tools, list) or not tools:
        raise RequestError("tool_choice: allowed_tools needs a list of tools, with one tool at least")
    names = set()
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in known:
            raise RequestError(f"tool_choice names the function {name!r:.60}, which is not among the tools")
        names.add(name)
    return mode, names


def _moved(schema: Any, reference: str) -> Any:
    """A schema that becomes a definition of another schema. References to its root are changed to `reference`."""
    if isinstance(schema, list):
        return [_moved(one, reference) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, reference) for name, value in schema.items()}
    if isinstance(target := moved.get("$ref"), str) and target.startswith("#"):
        moved["$ref"] = reference + target[1:]
    return moved


# Flexible white space is for human readers, and forced calls have none. Schema keywords that cannot be enforced are
# left to the model: tools come with all kinds of schemas, and few clients can change them.
_GUIDANCE = {"x-guidance": {"whitespace_flexible": False, "lenient": True}}
_LENIENT = {"x-guidance": {"lenient": True}}


def _function(tool: Json) -> tuple[str, Json]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestError(f'tools must be objects like {{"type": "function", "function": ...}}, not {tool!r:.80}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise RequestError("tools: every function needs a name")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"tools: the parameters of {name!r:.60} must be a JSON schema, an object")
    return name, parameters or {"type": "object", "properties": {}}
