"""The commands as a user types them, on a small model with random weights: one of each in a process of its own."""

import json
from pathlib import Path

import pytest

from tests.commands import run_here, run_process
from tests.engine.tiny import talking_directory

DUMMY = ("--load-format", "dummy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_directory(tmp_path_factory.mktemp("model"))


def test_generate_prints_the_prompt_and_its_continuation(model: Path) -> None:
    done = run_process("generate", model, *DUMMY, "--prompt", "The", "--max-tokens", "16", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The")
    assert len(done.stdout) > 4


def test_generate_completes_a_file_line_by_line(model: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "first", "max_tokens": 3, "ignore_eos": True},
        {"prompt": [1, 2, 3], "n": 2, "max_tokens": 4},
        {"messages": [{"role": "user", "content": "hello"}], "logit_bias": {"5": 1.5}},
        {"prompt": "which", "structured_outputs": {"choice": ["one", "two"]}},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    done = run_here("generate", model, *DUMMY, "--input", source, "--output", target, "--max-tokens", "5")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["line"] for result in results] == [1, 2, 3, 4]
    assert [len(result["completions"]) for result in results] == [1, 2, 1, 1]
    assert len(results[0]["completions"][0]["token_ids"]) == 3
    assert results[0]["metrics"]["ttft"] > 0
    assert results[3]["completions"][0]["text"] in ("one", "two")


def test_results_on_standard_output_are_nothing_but_lines_of_json(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        {"prompt": "one\u2028line", "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 0},
        {"prompt": "b", "stop": ["x"]},
    ]
    source.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    done = run_here("generate", model, *DUMMY, "--input", source)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.split("\n")[:-1])
    assert len(first["completions"][0]["logprobs"]) == 3
    assert len(first["completions"][0]["logprobs"][0]["top"]) == 2
    assert first["prompt_logprobs"][0] is None
    assert "stop" in second["completions"][0]


def test_earlier_results_survive_a_bad_input(model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [999]}')
    target.write_text("precious")
    assert run_here("generate", model, *DUMMY, "--input", source, "--output", target).returncode == 2
    assert target.read_text() == "precious"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "fine"}', '{"prompt": '], "line 2 is not valid JSON"),
        (['{"prompt": "fine"}', '{"prompt": [1, 999]}'], "line 2: token id 999 at position 1 is outside"),
        (['{"text": "x"}'], 'line 1: a JSON object with either "prompt" or "messages" is needed'),
        (['{"prompt": "x", "tempurature": 1}'], "line 1: unknown field 'tempurature'; known: prompt, messages, "),
        (['{"prompt": "x", "top_p": 7}'], "line 1: top_p=7 is out of range"),
        (['{"prompt": "x", "structured_outputs": {"regex": "("}}'], "line 1: structured_outputs.regex cannot be used"),
        (['{"prompt": "x", "structured_outputs": ["a"]}'], "line 1: structured_outputs must be an object with one of"),
        (['{"prompt": 5}'], "line 1: a prompt is text or a list of token ids, not 5"),
        (['{"messages": []}'], "line 1: messages is empty"),
        (['{"messages": "hi"}'], "line 1: messages must be a list of objects"),
        (['{"messages": null}'], "line 1: messages must be a list, not null"),
        (['{"prompt": "x", "min_tokens": 100000000000}'], "line 1: min_tokens=100000000000 is out of range"),
        (['{"prompt": "x", "logit_bias": {"a": 1}}'], "line 1: logit_bias names token id 'a'"),
        ([], "has no requests in it"),
    ],
)
def test_a_broken_line_is_named(model: Path, tmp_path: Path, lines: list[str], message: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    done = run_here("generate", model, *DUMMY, "--input", source)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "/no/such/model", "--prompt", "x"), "model directory /no/such/model does not exist"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature=-1.0 is out of range"),
        (("generate", "--prompt", "x", "--kv-cache-memory-bytes", "much"), "'much' is not a size in bytes"),
        (("generate", "--input", "/no/such/file"), "cannot read /no/such/file"),
        (("chat", "/no/such/model"), "model directory /no/such/model does not exist"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run_here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_chat_answers_every_line_and_shows_its_times(model: Path) -> None:
    done = run_process("chat", model, *DUMMY, "--max-tokens", "8", text="hello\n/reset\nagain\n/quit\nnever\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tokens; first after") == 2
    assert "never" not in done.stdout


def test_chat_goes_on_after_a_message_that_is_too_long(model: Path) -> None:
    done = run_here("chat", model, *DUMMY, "--max-tokens", "8", text=f"{'long ' * 40}\nshort\n")
    assert done.returncode == 0, done.stderr
    assert "the context is 128" in done.stderr
    assert done.stderr.count("tokens; first after") == 1


def test_help_names_every_command() -> None:
    done = run_process("--help")
    assert done.returncode == 0
    assert "chat" in done.stdout
    assert "generate" in done.stdout
