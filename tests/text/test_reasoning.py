import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strength import examples
from weft.errors import OptionError
from weft.text.reasoning import ReasoningParser, ReasoningState, detect_reasoning, initial_state, make_reasoning_parser


def split(parser: ReasoningParser, *pieces: str) -> tuple[str, str]:
    thoughts = [*(parser.push(piece) for piece in pieces), parser.flush(), parser.flush()]
    return "".join(t.reasoning for t in thoughts), "".join(t.content for t in thoughts)


EXAMPLES = [
    # open, reply, reasoning, content
    (False, "<think>\nHm.\n</think>\n\nYes.\n", "Hm.\n", "Yes.\n"),
    (False, "\n <think>Hm.</think>Yes.", "Hm.", "Yes."),
    (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (False, "<think>Hm.", "Hm.", ""),
    (False, "\nYes.", "", "\nYes."),
    (False, "<thin", "", "<thin"),
    (False, "<thing>", "", "<thing>"),
    (False, " \n", "", " \n"),
    (False, "", "", ""),
    (True, "\nHm.\n</think>\n\nYes.", "Hm.\n", "Yes."),
    (True, "\n<think>\nHm.</think>Yes.", "Hm.", "Yes."),
    (True, "</think>Yes.", "", "Yes."),
    (True, "Hm. </thin", "Hm. </thin", ""),
    (True, "Hm </think </</think>Yes.", "Hm </think </", "Yes."),
    (True, "<thi", "<thi", ""),
    # One thought a reply; an answer may speak of tags.
    (False, "The tags are <think> and </think>.", "", "The tags are <think> and </think>."),
    (True, "<think> is a tag.</think><think></think>", " is a tag.", "<think></think>"),
]


@pytest.mark.parametrize(("open", "reply", "reasoning", "content"), EXAMPLES)
def test_examples_in_one_piece_and_character_by_character(open, reply, reasoning, content):
    assert split(ReasoningParser(is_inside=open), reply) == (reasoning, content)
    assert split(ReasoningParser(is_inside=open), *reply) == (reasoning, content)


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", "\n", " ", "x"]) | st.text(max_size=3), max_size=12
)


@given(pieces, st.booleans(), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(300))
def test_cuts_do_not_matter(pieces, open, size):
    text = "".join(pieces)
    whole = split(ReasoningParser(is_inside=open), text)
    assert split(ReasoningParser(is_inside=open), *pieces) == whole
    assert split(ReasoningParser(is_inside=open), *(text[i : i + size] for i in range(0, len(text), size))) == whole


@given(st.text("ab<\n /think>", max_size=20), st.text("ab<\n /think>", max_size=20))
def test_thoughts_and_answers_come_out_as_they_went_in(reasoning, content):
    reasoning = reasoning.replace("</think>", "").lstrip("\n")
    if reasoning.lstrip().startswith("<think>") or "</think>" in reasoning:
        return
    text = f"{reasoning}</think>\n\n{content}"
    assert split(ReasoningParser(), "<think>\n", text) == split(ReasoningParser(is_inside=True), text)
    assert split(ReasoningParser(), "<think>\n", text) == (reasoning, content.lstrip("\n"))


def test_only_what_may_be_a_tag_is_held_back():
    parser = ReasoningParser()
    pieces = ["\n<th", "ink", ">", "\n", "a <", "/b </thi", "nk", ">\n", "\n", "b", " </think", "\n"]
    assert [parser.push(piece) for piece in pieces] == [
        *[("", "")] * 4,
        *[("a ", ""), ("</b ", ""), ("", ""), ("", ""), ("", ""), ("", "b"), ("", " </think"), ("", "\n")],
    ]
    assert parser.flush() == ("", "")


def test_other_tags():
    parser = ReasoningParser("[THINK]", "[/THINK]")
    assert split(parser, "[THI", "NK]Hm.[/THINK]", "<think>") == ("Hm.", "<think>")


@pytest.mark.parametrize(
    ("name", "prompt_end", "thinks"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
    ],
)
def test_the_end_of_the_prompt_tells_whether_the_reply_begins_inside(name, prompt_end, thinks):
    assert split(make_reasoning_parser(name, prompt_end), "text") == (("text", "") if thinks else ("", "text"))
    assert split(make_reasoning_parser(name, prompt_end), "<think>a</think>b") == ("a", "b")


def test_an_unknown_name_is_refused():
    with pytest.raises(OptionError, match="'o1' is unknown: choose deepseek_r1, qwen3"):
        make_reasoning_parser("o1", "")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% set content = content.split('</think>')[-1] %}{{'<｜Assistant｜><think>\\n'}}", "deepseek_r1"),
        ("{{'<｜Assistant｜>'}}{% if not thinking %}{{'</think>'}}{% else %}{{'<think>'}}{% endif %}", "qwen3"),
        ("{% if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}", "qwen3"),
        ("{{- '<|im_start|>' + message['role'] + message['content'] }}", None),
    ],
)
def test_the_format_is_seen_in_the_template(template, name):
    assert detect_reasoning(template) == name


@pytest.mark.parametrize(
    ("name", "prompt_end", "state"),
    [
        ("qwen3", "<|im_start|>assistant\n", ReasoningState(is_inside=False, is_over=False)),
        ("qwen3", "assistant\n<think>\n", ReasoningState(is_inside=True, is_over=False)),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", ReasoningState(is_inside=False, is_over=True)),
        ("deepseek_r1", "<｜Assistant｜>", ReasoningState(is_inside=True, is_over=False)),
        ("deepseek_r1", "<｜Assistant｜></think>", ReasoningState(is_inside=False, is_over=True)),
    ],
)
def test_where_the_reply_to_a_prompt_stands(name: str, prompt_end: str, state: ReasoningState) -> None:
    assert initial_state(name, prompt_end) == state


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_reply_that_was_begun_stands_where_its_text_does(name: str) -> None:
    assert initial_state(name, "the user says hello.", "<think>\nOkay, the user says hello.").is_inside
    for begun in ("<think>x</think>The answer is", "The answer is"):
        assert initial_state(name, begun[-32:], begun) == ReasoningState(is_inside=False, is_over=True)
        parser = make_reasoning_parser(name, begun[-32:], begun)
        assert split(parser, "<think>", " is a tag") == ("", "<think> is a tag")
