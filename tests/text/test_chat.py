"""Rendered side by side with Transformers, on templates written here in the styles of the published ones."""

import json
from datetime import datetime

import pytest
from transformers import PreTrainedTokenizerFast

from tests.text.conftest import byte_level
from weft.errors import ModelError, RequestError
from weft.text.chat import ChatTemplate, RunawayError
from weft.text.tokenizer import Tokenizer

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "system" %}{%- continue %}{%- endif %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 < ns.last_query %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{%- if item['type'] == 'text' -%}{{ item['text'] | trim }}
        {%- endif -%}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

PARTS_ONLY = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA}

USER = {"role": "user", "content": "Où est <b>&'\"  le café? 日本\n"}
TALK = [
    USER,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIci."},
    {"role": "user", "content": " Merci! "},
]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "brew",
            "description": "Brüht <Kaffee>",
            "parameters": {"type": "object", "size": [1, 2.5]},
        },
    }
]
CALLS = [
    SYSTEM,
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "brew", "arguments": {"cups": 2, "wie": "süß"}}}],
    },
    {"role": "tool", "content": "done"},
]


def theirs(template, messages, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template, **SPECIALS)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def outcome(render):
    """The text, or that the template refused; the two sides use different exceptions."""
    try:
        return render()
    except Exception as error:
        return "refused" if "alternate" in str(error) or "one tool call" in str(error) else error


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("name", "messages"),
    [(name, messages) for name in TEMPLATES for messages in ([USER], TALK, [SYSTEM, *TALK])]
    + [("llama3", CALLS), ("qwen", CALLS)],
)
def test_renders_like_transformers(name, messages, tools, prompt):
    template = ChatTemplate(TEMPLATES[name], SPECIALS)
    options = {"tools": tools, "add_generation_prompt": prompt}
    expected = outcome(lambda: theirs(TEMPLATES[name], messages, **options))
    assert outcome(lambda: template.render(messages, **options)) == expected
    assert isinstance(expected, str)


@pytest.mark.parametrize(
    "template",
    [
        "{{ x | tojson }} {{ x | tojson(indent=2) }} {{ x | tojson(separators=(',', ':'), sort_keys=true) }}",
        "{{ x | tojson(ensure_ascii=true) }}",
        "{% set v = 1 %}{% generation %}{% set v = 2 %}{{ v }}{% endgeneration %}{{ v }}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% if i > 4 %}{% break %}{% endif %}"
        "{% endfor %}",
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ undefined_thing }}|{{ documents[0].title }}",
        "{{ dict(a=1).a }}{{ namespace(a=2, self=3).self }}{{ messages | length }}{{ tools is none }}",
        "{{ strftime_now('%Y') }}",
        "  {% if true %}  \n  kept\n  {% endif %}  \n\n",
        "{% macro say(text) %}[{{ text | upper }}]{% endmacro %}{{ say(messages[0].role) }}{{ 'a<b' }}",
    ],
)
def test_helpers_match_transformers(template):
    options = {"x": {"b": "<é&>", "a": [1, None, True]}, "documents": [{"title": "t", "text": ""}]}
    assert ChatTemplate(template, SPECIALS).render([USER], **options) == theirs(
        template, [USER], add_generation_prompt=True, **options
    )


def test_template_options_reach_the_template_and_win_over_special_tokens():
    qwen = ChatTemplate(QWEN)
    assert qwen.render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert ChatTemplate("{{ bos_token }}", SPECIALS).render([USER], bos_token="[B]") == "[B]"
    assert ChatTemplate("{{ messages[0].role }}").render([USER], **{"messages": "forged", "self": 1}) == "user"
    assert datetime.now().strftime("%Y") in ChatTemplate(LLAMA3, SPECIALS).render([USER])


def test_text_parts_are_joined_where_the_template_expects_a_string():
    message = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert ChatTemplate(CHATML).render([message]) == ChatTemplate(CHATML).render(
        [{"role": "user", "content": "one\ntwo"}]
    )
    assert "onetwo" in ChatTemplate(GEMMA, SPECIALS).render([message])  # the template's own way with parts
    assert ChatTemplate(PARTS_ONLY).render([message]) == "user:one;two;"
    assert ChatTemplate(PARTS_ONLY).render([{"role": "user", "content": "one"}]) == "user:one;"
    assert message["content"][0] == {"type": "text", "text": "one"}  # the caller's messages are left alone


def test_tool_arguments_are_objects_to_the_template():
    call = {"type": "function", "function": {"name": "brew", "arguments": '{"cups": 2, "wie": "süß"}'}}
    as_string = [*CALLS[:2], {"role": "assistant", "content": None, "tool_calls": [call]}, CALLS[3]]
    for template in (LLAMA3, QWEN):
        chat = ChatTemplate(template, SPECIALS)
        assert chat.render(as_string, tools=TOOLS) == chat.render(CALLS, tools=TOOLS)
    call["function"]["arguments"] = '{"cups": '  # a model wrote this; the conversation goes on
    assert '{"cups": ' in ChatTemplate(QWEN).render(as_string)


def test_null_content_is_not_written_as_none():
    assert "None" not in ChatTemplate("{{ messages[0].content }}").render([{"role": "assistant", "content": None}])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], "role"),
        (["hello"], "role"),
        ([{"role": "user", "content": 3}], "content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        ([{"role": "user", "content": [None]}], "'NoneType'"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls must be a list"),
        ([{"role": "user", "content": "x", "when": datetime.now()}], "plain JSON"),
        ([TALK[1]], "alternate"),
        ([{"role": "user"}, {"role": "user"}], "alternate"),
    ],
)
def test_bad_messages_are_refused_in_one_line(messages, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        ChatTemplate(MISTRAL, SPECIALS).render(messages)
    assert "\n" not in str(caught.value)


def test_messages_nested_without_end_are_refused():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "x", "extra": deep}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__x__ = 1 %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_the_sandbox_holds(template):
    with pytest.raises(ModelError, match="sandbox forbids") as caught:
        ChatTemplate(template).render([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ strftime_now.__code__ }}",
        "{{ '{0.__class__}'.format(1) }}",
    ],
)
def test_what_the_sandbox_hides_is_empty(template):
    assert ChatTemplate(template).render([USER]) == ""


@pytest.mark.parametrize("template", ["{% for %}", "{{ x | no_such_filter }}", "{% endif %}", "{{ '" + "(" * 5000])
def test_a_broken_template_is_the_models_fault(template):
    with pytest.raises(ModelError, match="template is broken") as caught:
        ChatTemplate(template).render([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].role.name }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_ends_the_request_only(template):
    with pytest.raises(RequestError, match="cannot render these messages: ") as caught:
        ChatTemplate(template).render([USER])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endset %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [0] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    ],
    ids=["silent loops", "loops with text", "loops in a value", "a macro that calls itself", "a recursive loop"],
)
def test_a_template_that_goes_on_without_end_is_ended(template, monkeypatch):
    monkeypatch.setattr("weft.text.chat.MOST_CPU_S", 0.1)
    with pytest.raises(RunawayError, match=r"more than 0\.1 s of processor time") as caught:
        ChatTemplate(template).render([USER])
    assert "\n" not in str(caught.value)


def test_a_text_without_end_is_ended(monkeypatch):
    monkeypatch.setattr("weft.text.chat.MOST_TEXT", 1000)
    with pytest.raises(RunawayError, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(1001) %}x{% endfor %}").render([USER])
    assert ChatTemplate("{% for i in range(1000) %}x{% endfor %}").render([USER]) == "x" * 1000


def test_a_model_without_template_says_so_when_asked_to_chat(tmp_path):
    chat = ChatTemplate.load(tmp_path)
    assert not chat
    with pytest.raises(RequestError, match="no chat template"):
        chat.render([USER])


def test_templates_are_found_where_models_keep_them(tmp_path):
    def rendered(**options):
        chat = ChatTemplate.load(tmp_path)
        assert chat
        return chat.render([USER], **options)

    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json {{ eos_token }}"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert rendered() == "json </s>"
    named = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "{{ tools[0].type }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered() == "config"
    assert rendered(tools=[]) == "config"
    assert rendered(tools=TOOLS) == "function"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert rendered(tools=TOOLS) == "file </s>"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file with tools")
    assert rendered(tools=TOOLS) == "file with tools"


@pytest.mark.parametrize("value", [3, [3], [{"name": "default"}]])
def test_a_template_of_the_wrong_type_is_the_models_fault(tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelError, match="chat template in"):
        ChatTemplate.load(tmp_path)


def test_a_rendered_prompt_is_encoded_with_its_own_special_tokens():
    tokenizer = Tokenizer(byte_level(), SPECIALS, add_bos_token=True)
    prompt = ChatTemplate(GEMMA, SPECIALS).render([USER])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
