"""What `weft bench serve` tells beside the figures, and what it does not send: a process, and a scripted server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.http.scripted import Script, ScriptedServer, beside


def usage(body: dict[str, Any], number: int) -> Script:
    return Script([0.0] * body.get("max_tokens", 1))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A word is a token, and a chat template puts seven more around."""
    with beside(usage) as server:
        server.count = lambda text: 7 + len(text.split())
        yield server


def bench(server: ScriptedServer, folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What was printed, and what was written; the page is in report.html."""
    written = ["--json", str(folder / "result.json"), "--html", str(folder / "report.html"), "--save-detailed"]
    command = [sys.executable, "-m", "weft", "bench", "serve", "--url", server.url, *arguments, *written]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("tokenizes", [True, False])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_conversations_ask_for_their_answers_lengths_and_are_not_in_the_cache_already(
    server: ScriptedServer, tmp_path: Path, endpoint: str, tokenizes: bool
) -> None:
    server.tokenizes = tokenizes
    said = {f"What is {number}?": " ".join(["word"] * number) for number in (1, 5, 9)}
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": answer}] for text, answer in said.items()]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    _, found = bench(server, tmp_path, "--sharegpt", str(file), "--endpoint", endpoint)
    assert found["completed"] == 3
    texts = {True: [], False: []}  # by whether they are of the run; of those that counted no answer was streamed
    for body in server.bodies:
        text = body["messages"][0]["content"] if endpoint == "chat" else body["prompt"]
        texts[bool(body.get("stream")) and text != "Hello"].append((text, body["max_tokens"]))
    assert {text.split("\n")[-1]: tokens for text, tokens in texts[True]} == {
        "What is 1?": 1,
        "What is 5?": 5,
        "What is 9?": 9,
    }
    begun = {text.split("\n")[0] for text, _ in texts[True]}
    assert len(begun) == 1, "what they have in common stays common"
    assert not any(text.startswith(tuple(begun)) for text, _ in texts[False])


def test_a_trace_is_told_by_its_name_and_the_rate_that_it_came_to(server: ScriptedServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * number, "input_length": 20, "output_length": 1, "hash_ids": []} for number in range(5)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    out, found = bench(server, tmp_path, "--trace", str(trace), "--rate-scale", "5")
    assert (found["trace"], found["rate_scale"]) == ("trace.jsonl", 5)
    assert (found["request_rate"], found["pattern"], found["burstiness"]) == (None, None, None)
    assert found["achieved_request_rate"] == pytest.approx(10, rel=0.5)
    assert "trace.jsonl x 5: sent at" in out
    assert "trace trace.jsonl x 5.0, " in (tmp_path / "report.html").read_text()


def test_what_was_otherwise_than_asked_for_is_told_everywhere(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda body, number: Script([0.0] * body.get("max_tokens", 1), tells_usage=False)
    server.refused_fields = {"ignore_eos"}
    server.longest = 40
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("20\n30\n60\n")
    options = ["--input-len", str(lengths), "--output-len", "4", "--num-prompts", "9"]
    out, found = bench(server, tmp_path, *options)
    assert (found["completed"], found["left_out_too_long"], found["completed_without_usage"]) == (6, 3, 6)
    assert found["ignore_eos"] is False
    assert found["total_output_tokens"] == 24
    assert (found["request_rate"], found["trace"], found["rate_scale"]) == ("inf", None, None)
    page = (tmp_path / "report.html").read_text()
    for text in ("3 requests were left out", "refused ignore_eos", "no usage for 6 of 6 requests"):
        assert text in out
        assert text in page


def test_nothing_is_told_where_all_was_as_asked_for(server: ScriptedServer, tmp_path: Path) -> None:
    out, found = bench(server, tmp_path, "--input-len", "20", "--output-len", "4", "--num-prompts", "3")
    assert (found["left_out_too_long"], found["completed_without_usage"], found["ignore_eos"]) == (0, 0, True)
    assert "note:" not in out
