"""Outputs that keep to a form, on the model that ships with weft; forms that are refused, and hostile ones."""

import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

import weft
from tests.engine.tiny import talking_directory, tiny_directory, write_letters
from weft import LLM, RequestError, SamplingParams, StructuredOutputs
from weft.engine import structured
from weft.engine.hashing import root_hash
from weft.engine.masks import MaskBuilder
from weft.engine.params import Calls, Thoughts
from weft.engine.sequence import Sequence
from weft.engine.structured import Grammars, check_structure

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: "I have " NUMBER " " ("cats" | "dogs") "."\nNUMBER: /[1-9][0-9]{0,2}/'
GBNF = 'root ::= item item? item?\nitem ::= [a-z] "-" [0-9] ", "'
CHOICES = ["yes", "no", "yes, please", 'a "quoted" \\ one', "größer 😀"]


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        sorted(person) == ["age", "name", "tags"]
        and 1 <= len(person["name"]) <= 12
        and person["age"] in range(151)
        and len(person["tags"]) <= 3
        and set(person["tags"]) <= {"red", "green", "blue"}
    )


FORMS: dict[str, tuple[StructuredOutputs, Callable[[str], object]]] = {
    "json": (StructuredOutputs(json=PERSON), is_person),
    "json as text": (StructuredOutputs(json=json.dumps(PERSON)), is_person),
    "json_object": (StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        StructuredOutputs(regex=r"[A-Z][a-z]{2,8} \d{3}-\d{4}"),
        re.compile(r"[A-Z][a-z]{2,8} [0-9]{3}-[0-9]{4}").fullmatch,
    ),
    "json in unicode": (StructuredOutputs(json={"const": "größer 😀\u2028"}), '"größer 😀\u2028"'.__eq__),
    "choice": (StructuredOutputs(choice=CHOICES), CHOICES.__contains__),
    "lark": (StructuredOutputs(grammar=LARK), re.compile(r"I have [1-9][0-9]{0,2} (cats|dogs)\.").fullmatch),
    "gbnf": (StructuredOutputs(grammar=GBNF), re.compile(r"([a-z]-[0-9], ){1,3}").fullmatch),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # float32, so that the size of a batch cannot flip a token by rounding
    with LLM(dtype="float32", max_num_seqs=16, max_model_len=512, kv_cache_memory_bytes=64 << 20, seed=1) as made:
        yield made


def generate(llm: LLM, prompt: str = "Once upon a time", **params: Any) -> weft.Generation:
    (result,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 200, "seed": 5, **params}), progress=False)
    return result


@pytest.mark.parametrize("form", [form for form in FORMS if form != "json_object"])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.5, "top_p": 0.9}])
def test_the_output_has_the_form_and_ends_with_it(llm: LLM, form: str, params: dict[str, Any]) -> None:
    wish, good = FORMS[form]
    result = generate(llm, structured_outputs=wish, **params)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in llm.engine.eos_ids
    assert good(result.text), result.text


def test_any_json_object(llm: LLM) -> None:
    wish, good = FORMS["json_object"]
    assert llm.tokenizer is not None
    brief = dict.fromkeys(llm.tokenizer.encode('"}'), 20.0)
    result = generate(llm, structured_outputs=wish, temperature=1.5, logit_bias=brief)
    assert good(result.text), result.text


def test_every_one_of_n_keeps_to_it_and_a_seed_decides(llm: LLM) -> None:
    wish, good = FORMS["json"]
    several = generate(llm, structured_outputs=wish, temperature=1.5, n=3)
    assert all(good(completion.text) for completion in several.completions)
    assert len({completion.text for completion in several.completions}) == 3
    assert several.token_ids == generate(llm, structured_outputs=wish, temperature=1.5).token_ids


def test_in_a_mixed_batch_nobody_s_tokens_change(llm: LLM) -> None:
    wishes = [SamplingParams(structured_outputs=wish, seed=3, max_tokens=40) for wish, _ in FORMS.values()]
    wishes += [SamplingParams(temperature=0, max_tokens=30), SamplingParams(seed=4, max_tokens=30, ignore_eos=True)]
    prompts = [f"{number} of them went" for number in range(len(wishes))]
    alone = [llm.generate(p, w, progress=False)[0].token_ids for p, w in zip(prompts, wishes, strict=True)]
    together = llm.generate(prompts, wishes, progress=False)
    assert [result.token_ids for result in together] == alone


def test_preempted_requests_go_on_where_they_were(llm: LLM) -> None:
    wishes = [
        SamplingParams(structured_outputs=FORMS[form][0], seed=seed, temperature=1.2, max_tokens=70)
        for form in ("json", "json_object", "gbnf")
        for seed in range(3)
    ]
    expected = llm.generate(["Then"] * len(wishes), wishes, progress=False)
    with LLM(dtype="float32", max_num_seqs=8, max_model_len=80, kv_cache_memory_bytes=700_000) as narrow:
        results = narrow.generate(["Then"] * len(wishes), wishes, progress=False)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    assert sum(result.metrics.preemptions for result in results if result.metrics) >= 3


def test_the_end_of_the_grammar_wins_over_min_tokens_and_ignore_eos(llm: LLM) -> None:
    wish = StructuredOutputs(regex="(yes|no)!{0,9}")
    late = generate(llm, structured_outputs=wish, min_tokens=8)
    assert len(late.token_ids) >= 8
    assert re.fullmatch("(yes|no)!{4,9}", late.text)
    for params in ({"min_tokens": 50}, {"ignore_eos": True}):
        result = generate(llm, structured_outputs=StructuredOutputs(choice=["yes", "no"]), **params)
        assert (result.text in ("yes", "no"), result.finish_reason) == (True, "stop")
        assert len(result.token_ids) <= 4


def test_stops_end_it_early_as_ever(llm: LLM) -> None:
    wish = StructuredOutputs(regex="[a-z ]{40,}")
    whole = generate(llm, structured_outputs=wish, temperature=0, max_tokens=30)
    stop = whole.token_ids[3]
    cut = generate(llm, structured_outputs=wish, temperature=0, max_tokens=30, stop_token_ids=[stop])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert (cut.finish_reason, whole.finish_reason) == ("stop", "length")
    by_text = generate(llm, structured_outputs=wish, temperature=0, max_tokens=30, stop=whole.text[4:9])
    assert by_text.text == whole.text[: whole.text.index(whole.text[4:9])]


def test_bias_and_penalties_choose_among_what_is_allowed_and_logprobs_are_raw(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (forbidden,), (no, *_) = llm.tokenizer.encode("the"), llm.tokenizer.encode("no")
    result = generate(
        llm,
        structured_outputs=StructuredOutputs(choice=["yes", "no"]),
        temperature=0,
        logit_bias={forbidden: 100.0, no: 50.0},
        repetition_penalty=1.2,
        logprobs=3,
    )
    assert result.text == "no"
    plain = generate(llm, temperature=0, max_tokens=1, logprobs=3)
    assert result.logprobs is not None
    assert plain.logprobs is not None
    assert result.logprobs[0].top == pytest.approx(plain.logprobs[0].top)
    assert result.logprobs[0].rank > 1


@pytest.mark.parametrize("form", [form for form in FORMS if form != "json_object"])
def test_a_form_may_begin_behind_a_thought(llm: LLM, form: str) -> None:
    wish, _ = FORMS[form]
    reply = generate(llm, structured_outputs=wish).text
    assert llm.tokenizer is not None
    assert llm.engine.grammars is not None
    for is_open, text, accepted in (
        (True, "So, </thin {\n</think>\n\n" + reply, True),
        (True, reply, False),
        (False, "<think>\n</think>" + reply, True),
        (False, reply, True),
        (False, "<think>" + reply, False),
        (False, "So</think>" + reply, False),
    ):
        structure = replace(wish, behind=Thoughts("<think>", "</think>", is_open))
        matcher = llm.engine.grammars.compile(structure)[0].compiled.matcher()
        matcher.try_consume_tokens(llm.tokenizer.encode(text, add_special_tokens=False))
        assert matcher.is_accepting() == accepted, text


CALL = {"type": "object", "properties": {"name": {"const": "f"}}, "required": ["name"]}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "json_object"])
def test_calls_may_come_instead_of_a_form(llm: LLM, form: str) -> None:
    wish, _ = FORMS[form]
    reply = generate(llm, structured_outputs=wish).text
    assert llm.tokenizer is not None
    assert llm.engine.grammars is not None
    hermes = Calls(CALL, "<tool_call>", "</tool_call>", many=True)
    special = Calls(CALL, "<|user|>")  # a mark that is a token of its own
    call = '<tool_call>\n{"name": "f"}\n</tool_call>'
    for calls, text, accepted in (
        (hermes, reply, True),
        (hermes, call, True),
        (hermes, f"{call}\n{call}", True),
        (hermes, call[:-3], False),
        (hermes, '<tool_call>{"name": "g"}</tool_call>', False),
        (hermes._replace(many=False), f"{call}\n{call}", False),
        (special, '<|user|>{"name": "f"}', True),
        (special, reply, True),
        (Calls(CALL), '{"name": "f"}', True),
    ):
        for behind, thought in ((None, ""), (Thoughts("<think>", "</think>", starts_in_prompt=True), "Well.</think>")):
            structure = replace(wish, calls=calls, behind=behind)
            matcher = llm.engine.grammars.compile(structure)[0].compiled.matcher()
            ids = llm.tokenizer.encode(thought + text, add_special_tokens=False)
            whole = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert whole == accepted, (text, behind)


def test_the_schema_of_calls_is_checked_too() -> None:
    with pytest.raises(RequestError, match="cannot be used"):
        check_structure(StructuredOutputs(json_object=True, calls=Calls({"type": "nothing"}, "<tool_call>")))


def test_a_thought_is_free_and_what_follows_is_not(llm: LLM) -> None:
    wish = StructuredOutputs(choice=["yes", "no"], behind=Thoughts("<think>", ".", starts_in_prompt=True))
    result = generate(llm, structured_outputs=wish, temperature=1.2)
    thought, _, reply = result.text.partition(".")
    assert len(thought) > 1
    assert reply.strip() in ("yes", "no"), result.text
    assert result.finish_reason == "stop"


def test_a_reply_that_may_begin_with_a_tag_does_not_swallow_the_thought(tmp_path: Path) -> None:
    file = talking_directory(tmp_path / "tagged") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(file))
    structure = StructuredOutputs(regex=".*", behind=Thoughts("<think>", "</think>", starts_in_prompt=False))
    matcher = Grammars(file.parent, 259, (256,)).compile(structure)[0].compiled.matcher()
    ids = tokenizer.encode("<think>a\n\nb</think>c", add_special_tokens=False).ids
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_thoughts_that_no_grammar_can_hold_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.regex cannot be used"):
        generate(
            llm,
            structured_outputs=StructuredOutputs(regex="a", behind=Thoughts("a" * 10**6, "b", starts_in_prompt=False)),
        )


def test_a_grammar_may_name_special_tokens(llm: LLM) -> None:
    wish = StructuredOutputs(grammar='start: "one" <|user|> "two"')
    assert generate(llm, structured_outputs=wish, skip_special_tokens=False).text.startswith("one<|user|>two")
    check_structure(StructuredOutputs(grammar="start: <|nobody|>"))
    with pytest.raises(RequestError, match="unknown special token"):
        generate(llm, structured_outputs=StructuredOutputs(grammar="start: <|nobody|>"))


def test_a_grammar_that_fails_on_the_way_ends_its_request_and_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "DRY_RUN_TOKENS", 1)
    hostile = SamplingParams(structured_outputs=StructuredOutputs(regex="((a{1,90}){1,90}){1,90}"), max_tokens=200)
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    failed, other = llm.generate(["one", "other"], [hostile, plain], progress=False)
    assert re.fullmatch("a+", failed.text)
    assert failed.finish_reason == "stop"
    assert len(failed.token_ids) < 60
    assert len(other.token_ids) == 60


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"json": "{"}, r"structured_outputs\.json cannot be used: it is not JSON \(Expecting"),
        ({"json": {"type": "strong"}}, "Invalid type: strong"),
        ({"json": {"type": "array", "uniqueItems": True}}, r'Unimplemented keys: \["uniqueItems"\]; "x-guidance"'),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "Unsatisfiable schema"),
        ({"json": {"type": "string", "pattern": "("}}, "regex parse error: unclosed group"),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"const": float("nan")}}, "it is not JSON"),
        ({"json": {"$ref": "#"}}, "no text satisfies it"),
        ({"regex": "a(?=b)"}, "regex parse error: look-around"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"json": {"const": "\ud800"}}, "surrogates not allowed"),
        ({"choice": ["\ud800"]}, "hex escape"),
        ({"regex": "a" * 100_001}, "has 100001 characters, and at most 100000 are allowed"),
        ({"grammar": "start: other"}, "unknown name: \"other\""),
        ({"grammar": "root ::= other"}, "it is not GBNF: Rule 'other' not found"),
        ({"grammar": ""}, "Empty grammar"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_with_the_reason(llm: LLM, wish: dict[str, Any], message: str) -> None:
    made = StructuredOutputs(**wish)
    with pytest.raises(RequestError, match=message):
        check_structure(made)
    with pytest.raises(RequestError, match=message):
        llm.generate(["good", "bad"], [SamplingParams(), SamplingParams(structured_outputs=made)], progress=False)
    assert not llm.engine.loop.has_work


@pytest.mark.parametrize(
    "wish",
    [
        {"json": {"enum": [1] * 100_000}},
        {"json": {"enum": [[1, 2], {"a": "x" * 100_000}]}},
        {"json": {"x" * 100_001: True}},
        {"json": json.dumps({"enum": [1] * 1_000_000})},
        {"choice": ["x" * 60_000, "y" * 60_000]},
    ],
)
def test_what_is_far_too_long_is_not_written_down_first(wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_source", lambda structure: pytest.fail("it was"))
    with pytest.raises(RequestError, match=f"{next(iter(wish))} has far more than 100000 characters"):
        check_structure(StructuredOutputs(**wish))


def test_a_schema_as_text_may_be_indented() -> None:
    text = json.dumps({"enum": [f"word {number}" for number in range(400)]}, indent=200)
    assert len(text) > structured.MAX_TEXT
    check_structure(StructuredOutputs(json=text))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({}, "has nothing in it: give exactly one of json, json_object, regex, choice, grammar"),
        ({"json": {}, "regex": "a"}, "has json and regex in it"),
        ({"json": 5}, r"structured_outputs\.json must be str or dict, not 5"),
        ({"json_object": "yes"}, "json_object must be bool"),
        ({"choice": "yes"}, "choice must be list or tuple"),
        ({"choice": []}, "choice must name at least one text"),
        ({"choice": ["a", 1]}, "choice must name at least one text"),
        ({"schema": {}}, "unknown field 'schema'; known: json, json_object, regex, choice, grammar"),
        ([], "must be an object with one of json"),
    ],
)
def test_exactly_one_form_is_asked_for(wish: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputs.of(wish)
    with pytest.raises(RequestError, match=r"structured_outputs=\{'json': \{\}\} must be Struct"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chained(links: int) -> dict[str, Any]:
    parts: dict[str, Any] = {f"{i}": {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(links)}
    return {"$defs": {**parts, f"{links}": {"type": "string"}}, "$ref": "#/$defs/0"}


def lines(line: Callable[[int], str], count: int) -> str:
    return "".join(line(number) + "\n" for number in range(count))


HOSTILE: dict[str, dict[str, Any]] = {
    "nested repetition": {"regex": "(a{1,1000}){1,1000}"},
    "a long forced text": {"regex": "a{1000000}"},
    "many ways to match": {"regex": "(a?){500}a{500}"},
    "parentheses": {"regex": "(" * 99_000},
    "lines in a message": {"regex": "(" + "\n" * 99_000},
    "a nested schema": {"json": nested(500)},
    "a very nested schema": {"json": nested(50_000)},
    "nested text": {"json": '{"items":' * 9_000 + "{}" + "}" * 9_000},
    "properties": {"json": {"type": "object", "properties": {f"k{i}": {} for i in range(2_000)}}},
    "alternatives": {"json": {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]}},
    "nested rules": {"grammar": "start: r0\n" + lines(lambda i: f"r{i}: ((((r{i + 1})+)+)+)+", 500) + 'r500: "a"'},
    "doubled terminals": {"grammar": "start: A0\n" + lines(lambda i: f"A{i}: A{i + 1} A{i + 1}", 60) + 'A60: "a"'},
    "rules of GBNF": {"grammar": "root ::= r0\n" + lines(lambda i: f"r{i} ::= r{i + 1}", 900) + 'r900 ::= "a"'},
    "empty lines": {"grammar": "\n" * 19_000 + "?"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_forms_are_refused_in_bounded_time(case: str) -> None:
    started = time.perf_counter()
    with pytest.raises(RequestError, match=r"structured_outputs\.(json|regex|grammar) "):
        check_structure(StructuredOutputs(**HOSTILE[case]))
    assert time.perf_counter() - started < 10  # on a machine that is busy; a second otherwise


@pytest.mark.parametrize(
    "wish",
    [
        {"json": chained(1_800)},
        {"grammar": "start: r0\n" + lines(lambda i: f"r{i}: r{i + 1}", 1_400) + 'r1400: "a"'},
        {"grammar": "start: A0\n" + lines(lambda i: f'A{i}:("x" A{i + 1})+', 900) + 'A900: "a"'},
    ],
)
def test_long_chains_of_references_do_not_overrun_the_stack(wish: dict[str, Any]) -> None:
    check_structure(StructuredOutputs(**wish))


def test_the_check_needs_no_torch() -> None:
    code = (
        "import sys; from weft.engine.params import StructuredOutputs; "
        "from weft.engine.structured import check_structure; check_structure(StructuredOutputs(json_object=True)); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_model_without_a_tokenizer_or_without_an_end_keeps_to_none(tmp_path: Path) -> None:
    wish = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with (
        LLM(tiny_directory(tmp_path / "mute"), load_format="dummy") as mute,
        pytest.raises(RequestError, match=r"has no tokenizer\.json, so no structure can be kept to"),
    ):
        mute.generate([[1]], wish)
    with pytest.raises(RequestError, match="names no end-of-text token"):
        Grammars(talking_directory(tmp_path / "endless"), 257, ()).compile(StructuredOutputs(regex="a"))
    (tmp_path / "endless" / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match=r"tokenizer\.json cannot be used for structured output"):
        Grammars(tmp_path / "endless", 257, (256,)).compile(StructuredOutputs(regex="a"))


def stream_of(grammars: Grammars, wish: StructuredOutputs, **params: Any) -> Sequence:
    return Sequence.create(
        "a stream",
        np.array([1, 2], np.int32),
        SamplingParams(structured_outputs=wish, **params),
        seed=0,
        max_tokens=9,
        eos_ids=(0, 9),
        root=root_hash(),
        hashes=[],
        arrival=0.0,
        grammar=grammars.compile(wish)[0],
    )


def allowed(masks: MaskBuilder, stream: Sequence) -> list[int]:
    while stream not in masks.collect():
        masks.wait_for_first(1.0)
    row = masks.read([stream]).view(np.uint8)
    return np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist()


def behind(masks: MaskBuilder, stream: Sequence, token: int) -> list[int]:
    """What is allowed behind one more token."""
    stream.output.append(token)
    masks.advance(stream, token)
    return allowed(masks, stream)


@pytest.fixture
def masks() -> Iterator[MaskBuilder]:
    made = MaskBuilder()
    yield made
    made.close()


@pytest.mark.parametrize("rows", [64, 100, 30])  # more than the tokenizer has tokens, and fewer
def test_masks_are_about_tokens_that_spell_something(tmp_path: Path, masks: MaskBuilder, rows: int) -> None:
    grammars = Grammars(write_letters(tmp_path, (0, 9)), rows, (0, 9))
    one, other = (stream_of(grammars, StructuredOutputs(regex=".{0,2}")) for _ in range(2))
    for stream in (one, other):
        masks.add(stream)
    masks.wait_for_new(10.0)
    assert masks.collect() == [one, other]
    words = -(-max(rows, 60) // 32)
    assert masks.read([one, other]).shape == (2, words)
    assert behind(masks, one, 3) == list(range(60))
    assert behind(masks, one, 4) == [0, 9]
    assert behind(masks, other, 5) == list(range(60))


def test_an_end_inside_a_text_is_no_text(tmp_path: Path, masks: MaskBuilder) -> None:
    stream = stream_of(Grammars(write_letters(tmp_path, (0, 9)), 64, (0, 9)), StructuredOutputs(regex="a[^b]{3}"))
    masks.add(stream)
    (a,) = allowed(masks, stream)
    assert not {0, 9} & set(behind(masks, stream, a))


def test_a_ban_holds_while_anything_else_is_allowed(tmp_path: Path, masks: MaskBuilder) -> None:
    grammars, wish = Grammars(write_letters(tmp_path, (0, 9)), 64, (0, 9)), StructuredOutputs(regex="a{0,3}")
    late = stream_of(grammars, wish, min_tokens=2)
    masks.add(late)
    assert allowed(masks, late) == [1]
    assert behind(masks, late, 1) == [1]
    assert behind(masks, late, 1) == [0, 1, 9]
    impossible = stream_of(grammars, StructuredOutputs(regex="a"), min_tokens=5)
    masks.add(impossible)
    assert allowed(masks, impossible) == [1]
    assert behind(masks, impossible, 1) == [0, 9]


def test_a_stream_that_has_ended_leaves_no_mask(tmp_path: Path, masks: MaskBuilder) -> None:
    grammars = Grammars(write_letters(tmp_path, (0, 9)), 64, (0, 9))
    one, other = (stream_of(grammars, StructuredOutputs(regex=".*")) for _ in range(2))
    for stream in (one, other):
        masks.add(stream)
    masks.drop(one)
    masks.drop(one)
    masks.wait_for_new(10.0)
    assert masks.collect() == [other]
    masks.clear()
    assert masks.collect() == []


def test_equal_forms_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(structured, "_dry_run", lambda kind, *_: tried.append(kind))
    grammars = Grammars(write_letters(tmp_path, (0, 9)), 64, (0, 9))
    grammars.check(StructuredOutputs(json={"type": "null"}))
    assert len(grammars.compile(StructuredOutputs(json='{"type":  "null"}'), 3)) == 3
    grammars.compile(StructuredOutputs(regex="null"))
    assert tried == ["json", "regex"]


def test_a_request_that_waits_has_no_matcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 prompts with a schema of 100 KB took 35 s and 0.5 GB before the first of them began."""
    grammars = Grammars(write_letters(tmp_path, (0, 9)), 64, (0, 9))
    wish = StructuredOutputs(regex="(ab)+")
    grammars.check(wish)
    made: list[str] = []
    build = structured._matcher

    def counted(text: str, tokenizer: LLTokenizer) -> LLMatcher:
        made.append(text)
        return build(text, tokenizer)

    monkeypatch.setattr(structured, "_matcher", counted)
    many = [grammars.compile(wish)[0] for _ in range(1024)]
    assert {grammar.mask(None).tobytes() for grammar in many} == {many[0].mask(None).tobytes()}
    assert len(made) == 1
    assert many[0].mask(1).tobytes() != many[0].mask(None).tobytes()
    assert len(made) == 1, "the first takes the one that the mask was made with"
    many[1].mask(1)
    assert len(made) == 2


def test_a_mask_does_not_wait_for_the_matchers_of_other_streams(
    tmp_path: Path, masks: MaskBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight streams had four threads between them: while as many large matchers were made, no stream got a mask."""
    grammars = Grammars(write_letters(tmp_path, (0, 9)), 64, (0, 9))
    running = stream_of(grammars, StructuredOutputs(regex="(ab)+"))
    masks.add(running)
    assert behind(masks, running, allowed(masks, running)[0]) == [2]
    newcomers = [stream_of(grammars, StructuredOutputs(regex=f"a{{{length}}}")) for length in range(2, 10)]
    go_on, build = threading.Event(), structured._matcher

    def slow(text: str, tokenizer: LLTokenizer) -> LLMatcher:
        assert go_on.wait(60), "the test never let it go on"
        return build(text, tokenizer)

    monkeypatch.setattr(structured, "_matcher", slow)
    for stream in newcomers:
        masks.add(stream)
    assert behind(masks, running, 2) == [0, 1, 9]
    go_on.set()
    assert all(allowed(masks, stream) == [1] for stream in newcomers[:1])


def test_what_one_request_uses_up_is_not_missing_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scarce = LLParserLimits(max_lexer_states=800, verbose_errors=False)
    monkeypatch.setattr(structured, "_limits", lambda: scarce)
    grammars = Grammars(write_letters(tmp_path, (0, 9)), 64, (0, 9))
    one, other = (grammar.compiled.matcher() for grammar in grammars.compile(StructuredOutputs(regex=".*a.{20}"), 2))
    choose = random.Random(1)
    for matcher, tokens in ((one, 2000), (other, 20)):
        for _ in range(tokens):
            matcher.consume_token(choose.choice([1, 2]))  # a or b, and every order of them is a state
            matcher.compute_bitmask()
    assert (one.is_error(), other.is_error()) == (True, False)


def test_parameters_survive_the_way_to_another_process() -> None:
    for wish, _ in FORMS.values():
        params = SamplingParams(structured_outputs=wish, logit_bias={5: 1.5}, stop=["x"], stop_token_ids=[3])
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError, match="exactly one"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"structured_outputs": {}}), type=SamplingParams)
