import json
import re
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strength import examples
from weft.errors import OptionError
from weft.text.tools import TOOL_PARSERS, detect_tool_format, make_tool_parser

WEATHER = '{"city": "Paris"}'


def parse(format: str, *pieces: str, tools: tuple[str, ...] = ()) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the calls as (name, arguments), of a reply that comes in these pieces."""
    numbers = count()
    parser = make_tool_parser(format, tools, make_id=lambda: f"id{next(numbers)}")
    content, calls = "", []
    for parsed in [*(parser.push(piece) for piece in pieces), parser.flush(), parser.flush()]:
        content += parsed.content
        for index, id, name, arguments in parsed.calls:
            if name is not None:
                assert (index, id) == (len(calls), f"id{len(calls)}")
                calls.append([name, ""])
            else:
                assert id is None
                assert arguments
            assert index == len(calls) - 1
            calls[-1][1] += arguments
    return content, [(name, arguments) for name, arguments in calls]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


HERMES = [
    ("Just text.\n", "Just text.\n", []),
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": [2 ]}}\n</tool_call>\n',
        *("Let me see.", [("f", "{}"), ("g", '{"b": [2 ]}')]),
    ),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone. ', "\nDone.", [("f", "{}")]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),  # no end marker
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", [("f", "[1]")]),
    (r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\n\"}"}</tool_call>', "", [("f", r'{"a": "\n"}')]),
    (r'<tool_call>{"name": "f", "arguments": "not JSON"}</tool_call>', "", [("f", '"not JSON"')]),
    (r'<tool_call>{"name": "f", "arguments": "\"\ud800\""}</tool_call>', "", [("f", r'"\"\ud800\""')]),
    ('<tool_call>{"id": [{}], "name": "f", "parameters": {"a": 1}, "x": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}</tool_call>', "", [("f", '{"a": 1}')]),
    (r'<tool_call>{"name": "caf\u00e9", "arguments": {"a": "\u00e9"}}', "", [("café", r'{"a": "\u00e9"}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "1\n2\t3"}}</tool_call>', "", [("f", r'{"a": "1\n2\t3"}')]),
    # What cannot be a call is content.
    ("a <tool_call", "a <tool_call", []),
    ("a < b <tool_ </tool_call>", "a < b <tool_ </tool_call>", []),
    ("<tool_call> none\n</tool_call>", "<tool_call> none\n</tool_call>", []),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ('<tool_call>{"name": 3}', '<tool_call>{"name": 3}', []),
    ('<tool_call>{"name": ""}', '<tool_call>{"name": ""}', []),
    ('<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"arguments": {"a": 1}}', []),
    ('<tool_call>{"arguments": {"a', '<tool_call>{"arguments": {"a', []),
    ('<tool_call>\n{"na', '<tool_call>\n{"na', []),
    ('<tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>", [("f", "{}")]),
    # The arguments are complete, the rest is not: the call stands.
    ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>!', "}!", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>!', ", oops}!", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}', "", [("f", "{}")]),
    # The arguments break, and the call is out already: they get what the model wrote.
    ('<tool_call>{"name": "f", "arguments": {"a": True}}\n</tool_call>!', "!", [("f", '{"a": True}}')]),
    ('<tool_call>{"name": "f", "arguments": {a: 1}}<tool_call>{"name": "g"}', "", [("f", "{a: 1}}"), ("g", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "\\x"}</tool_call>', "", [("f", '"\\x"}')]),
    ('<tool_call>{"name": "f", oops</tool_call>', "", [("f", "oops")]),
    # The reply ends, as with max_tokens.
    ('<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),
    ('<tool_call>{"name": "f", "arguments": "{', "", [("f", '"{')]),
    ('<tool_call>{"name": "f", "argu', "", [("f", "")]),
]

LLAMA3_JSON = [
    ("Just text; {1}", "Just text; {1}", []),
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('\n{"type": "function", "name": "f", "arguments": {}}\n', "", [("f", "{}")]),
    ('{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('<|python_tag|>{"name": "f"}', "", [("f", "{}")]),
    ('Sure. <|python_tag|> {"name": "f", "parameters": {}}', "Sure.", [("f", "{}")]),
    ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    ('{"name": "f", "parameters": {}}\n<|python_tag|>{"name": "g"};', "", [("f", "{}"), ("g", "{}")]),
    ('{"name": "f", "parameters": {}}; and text', "; and text", [("f", "{}")]),
    ('{"name": "f", "parameters": {"a": x}}', "", [("f", '{"a": x}}')]),
    # JSON that is no call, and code that is no JSON.
    ("{}", "{}", []),
    (' {"answer": 42} ', ' {"answer": 42} ', []),
    ('{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}', []),
    ('{"name": "Bob"}', '{"name": "Bob"}', []),
    ('{"type": "cat", "legs": 4}', '{"type": "cat", "legs": 4}', []),
    ("{x | x > 0} is a set", "{x | x > 0} is a set", []),
    ("<|python_tag|>print({})", "<|python_tag|>print({})", []),
    ('Here: {"name": "f", "parameters": {}}', 'Here: {"name": "f", "parameters": {}}', []),
]

MISTRAL = [
    ("Just [text]", "Just [text]", []),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ('[TOOL_CALLS][{"arguments": {}, "name": "f"} ,\n{"name": "g", "arguments": {}}]', "", [("f", "{}"), ("g", "{}")]),
    ('Well. [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}] \n', "Well.", [("f", "{}")]),
    ('[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ('[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ('[TOOL_CALLS]my-f.x_2[ARGS]{"a": 1}', "", [("my-f.x_2", '{"a": 1}')]),
    (
        'Well.[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}',
        "Well.",
        [("f", '{"a": "[TOOL_CALLS]"}'), ("g", "{}")],
    ),
    ("[TOOL_CALLS]f[CALL_ID]call_1[ARGS]{}", "", [("f", "{}")]),
    ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("[TOOL_CALLS] I cannot do that", "[TOOL_CALLS] I cannot do that", []),
    ("[TOOL_CALLS]f[ARGH]{}", "[TOOL_CALLS]f[ARGH]{}", []),
    ("[TOOL_CALLS]{}", "[TOOL_CALLS]{}", []),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"b": 1}]', ', {"b": 1}]', [("f", "{}")]),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("[TOOL_CALLS]f{oops}[TOOL_CALLS]g{}", "", [("f", "{oops}"), ("g", "{}")]),
]

EXAMPLES = [
    (format, *example)
    for format, examples in [("hermes", HERMES), ("llama3_json", LLAMA3_JSON), ("mistral", MISTRAL)]
    for example in examples
]


@pytest.mark.parametrize(("format", "reply", "content", "calls"), EXAMPLES)
def test_examples_in_one_piece_and_character_by_character(format, reply, content, calls):
    assert parse(format, reply) == (content, calls)
    assert parse(format, *reply) == (content, calls)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    # Text that looks like JSON or like a marker, and characters that are escaped.
    | st.lists(st.sampled_from([*'{}[]":,;\\/\n\t\0é\U0001f600', "</tool_call>", "[TOOL_CALLS]"]), max_size=5).map(
        "".join
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=4)
names = st.text("abc_-1", min_size=1, max_size=8)
spellings = st.builds(
    lambda ascii, indent, separators: {"ensure_ascii": ascii, "indent": indent, "separators": separators},
    *(st.booleans(), st.sampled_from([None, 0, 2]), st.sampled_from([None, (",", ":"), (" ,\n", " :\t")])),
)
places = st.lists(st.integers(0, 10_000), max_size=8)


def write(format: str, calls: list[tuple[str, str]], variant: int) -> str:
    """A reply as a model writes it; `variant` picks one of the ways that a format has."""
    key = "parameters" if format == "llama3_json" else "arguments"
    pairs = [[f'"name": {json.dumps(name)}', f'"{key}": {arguments}'] for name, arguments in calls]
    written = ["{" + ", ".join(reversed(pair) if variant % 2 else pair) + "}" for pair in pairs]
    if format == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    if format == "llama3_json":
        return "<|python_tag|>" * (variant % 3 == 0) + "; ".join(written)
    if variant > 1:
        return "".join(f"[TOOL_CALLS]{name}{'[ARGS]' * (variant == 2)}{arguments}" for name, arguments in calls)
    return f"[TOOL_CALLS] [{', '.join(written)}]"


@pytest.mark.parametrize("format", TOOL_PARSERS)
@given(st.lists(st.tuples(names, objects), min_size=1, max_size=3), spellings, st.integers(0, 3), places)
@settings(deadline=None)
def test_any_json_survives_as_it_was_written_however_it_is_cut(format, calls, spelling, variant, places):
    written = [(name, json.dumps(arguments, **spelling)) for name, arguments in calls]
    content, parsed = parse(format, *cut(write(format, written, variant), places))
    assert (content, parsed) == ("", written)


@pytest.mark.parametrize("format", TOOL_PARSERS)
@given(st.tuples(names, objects), st.integers(0, 1))
@settings(deadline=None)
def test_json_in_a_string_is_taken_out(format, call, variant):
    name, arguments = call[0], json.dumps(call[1], ensure_ascii=False)
    assert parse(format, write(format, [(name, json.dumps(arguments))], variant)) == ("", [(name, arguments)])


MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"]
STARTS = ['{"name": "f"', '{"name": "f", "arguments": {', '"name":', '"arguments"', ': {"a": 1}']
fragments = st.sampled_from([*MARKERS, *STARTS, *'<[]{}:,;"\\ \n1', "\\u00", "e9", "null", "f", "text"])


@pytest.mark.parametrize("format", TOOL_PARSERS)
@given(st.lists(fragments, max_size=15).map("".join), places)
@settings(deadline=None, max_examples=examples(300))
def test_nonsense_does_not_depend_on_cuts_and_is_not_lost(format, reply, places):
    content, calls = parse(format, reply)
    assert parse(format, *cut(reply, places)) == parse(format, *reply) == (content, calls)
    if not calls:
        assert content == reply


@pytest.mark.parametrize("format", TOOL_PARSERS)
@given(
    st.sampled_from([(reply, at) for _, reply, _, _ in EXAMPLES for at in range(len(reply))]), st.characters(), places
)
@settings(deadline=None, max_examples=examples(300))
def test_one_wrong_character_does_no_harm(format, spot, wrong, places):
    reply, at = spot
    reply = reply[:at] + wrong + reply[at + 1 :]
    content, calls = parse(format, reply)
    assert parse(format, *cut(reply, places)) == (content, calls)
    if not calls:
        assert content == reply


@pytest.mark.parametrize(
    ("format", "until_name", "until_arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f"', ', "arguments": ', "}</tool_call>"),
        ("llama3_json", '{"name": "f"', ', "parameters": ', "}"),
        ("mistral", '[TOOL_CALLS][{"name": "f"', ', "arguments": ', "}]"),
        ("mistral", "[TOOL_CALLS]f{", "", ""),
    ],
)
def test_the_name_goes_out_with_its_last_character_and_then_the_arguments(format, until_name, until_arguments, rest):
    parser = make_tool_parser(format, ["f"], make_id=lambda: "id")
    assert parser.push(until_name[:-1]) == ("", [])
    brace = "{" * until_name.endswith("f{")
    assert parser.push(until_name[-1]) == ("", [(0, "id", "f", brace)])
    assert parser.push(until_arguments) == ("", [])
    for char in WEATHER.removeprefix(brace):
        assert parser.push(char) == ("", [(0, None, None, char)])
    assert parser.push(rest) == parser.flush() == ("", [])


def test_text_goes_out_at_once_except_what_may_be_a_marker_or_next_to_one():
    parser = make_tool_parser("hermes")
    pieces = ["Hi", " ", "you <", "b> <tool", "_c", "all", "!", "\n", "<tool_call>", "{", '"', "x", "]"]
    shown = ["Hi", "", " you", " <b>", "", "", " <tool_call!", "", "", "", "", "", ""]
    assert [parser.push(piece).content for piece in pieces] == shown
    assert parser.flush().content == '\n<tool_call>{"x]'


def test_a_json_answer_streams_as_soon_as_it_cannot_be_a_call():
    parser = make_tool_parser("llama3_json", ["f"])
    assert [parser.push(piece).content for piece in ('{"answer', '": 4', "2", "}")] == ["", '{"answer": 4', "2", "}"]


def test_known_tools_tell_a_bare_call_from_an_answer():
    assert parse("llama3_json", '{"name": "f"}', tools=("f",)) == ("", [("f", "{}")])
    answer = '{"name": "Bob", "parameters": {}}'
    assert parse("llama3_json", answer, tools=("f",)) == (answer, [])
    marked = "<|python_tag|>" + answer  # the model wants to call, be it something that does not exist
    assert parse("llama3_json", marked, tools=("f",)) == ("", [("Bob", "{}")])
    assert parse("hermes", f"<tool_call>{answer}", tools=("f",)) == ("", [("Bob", "{}")])


def test_ids():
    for format, shape, reply in [
        ("hermes", r"call_[0-9a-f]{24}", '<tool_call>{"name": "f"}</tool_call>' * 2),
        ("llama3_json", r"call_[0-9a-f]{24}", '{"name": "f", "parameters": {}};{"name": "f", "parameters": {}}'),
        ("mistral", r"[0-9a-f]{9}", "[TOOL_CALLS]f{}[TOOL_CALLS]f{}"),
    ]:
        first, second = make_tool_parser(format).push(reply).calls
        assert re.fullmatch(shape, first.id)
        assert re.fullmatch(shape, second.id)
        assert first.id != second.id
    (call,) = make_tool_parser("mistral").push("[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{}").calls
    assert call.id == "aB3456789"


def test_endless_nesting_is_neither_slow_nor_an_error():
    arguments = "[" * 100_000
    assert parse("hermes", '<tool_call>{"name": "f", "arguments": ', arguments) == ("", [("f", arguments)])
    reply = '<tool_call>{"name": "f", "arguments": ' + json.dumps(arguments) + "}"
    assert parse("hermes", reply) == ("", [("f", json.dumps(arguments))])


def test_an_unknown_format_is_refused():
    with pytest.raises(OptionError, match="'pythonic' is unknown: choose hermes, llama3_json, mistral"):
        make_tool_parser("pythonic")


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (r"""{{- "<tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call><|im_end|>\n" }}""", "hermes"),
        (r"""{{- '\n<tool_call>\n' }}{{- '{ ' }}{{- '"name": "' }}{{- tool_call.name }}""", "hermes"),
        (r"""{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}{"name"}""", None),
        (r"""{{- '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>""", None),
        (
            r"""{{- '<|start_header_id|>assistant' }}{{- '{"name": "' + c.name + '", ' }}{{- '"parameters": ' }}""",
            "llama3_json",
        ),
        (r"""{{- '<|start_header_id|>assistant' }}{{- '[' + c.name + '(' }}""", None),
        (r"""{{- "[TOOL_CALLS] [" }}{{- tool_call.function|tojson }}""", "mistral"),
        (r"""{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}""", "mistral"),
        (r"""{{- '<|im_start|>' + message['role'] + message['content'] }}""", None),
    ],
)
def test_the_format_is_seen_in_the_template(template, format):
    assert detect_tool_format(template) == format
