"""Tool calls that a model writes as text: the formats by name, and detection of the format of a chat template."""

from collections.abc import Callable, Sequence

from weft.errors import OptionError
from weft.text.tools.formats import HermesParser, Llama3JsonParser, MistralParser
from weft.text.tools.parser import Parsed, ToolCallDelta, ToolParser

__all__ = ["TOOL_PARSERS", "Parsed", "ToolCallDelta", "ToolParser", "detect_tool_format", "make_tool_parser"]

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
}


def make_tool_parser(name: str, tools: Sequence[str] = (), make_id: Callable[[], str] | None = None) -> ToolParser:
    """A parser for one reply. `tools` are the names of the tools that the model was offered, as far as known."""
    if name not in TOOL_PARSERS:
        raise OptionError(f"tool_call_parser={name!r} is unknown: choose {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name](tools, make_id)


def detect_tool_format(template: str) -> str | None:
    """The format that a chat template (its source text) teaches its model; None if it is none of these."""
    source = template.replace('\\"', '"')
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source and '"name"' in source:
        # Other models put XML between the same tags: Qwen3-Coder <function=...>, GLM <arg_key>.
        return None if "<function=" in source or "<arg_key>" in source else "hermes"
    if "<|start_header_id|>" in source and '{"name"' in source and '"parameters"' in source:
        return "llama3_json"
    return None
