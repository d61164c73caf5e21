"""What the commands that measure servers refuse, keep, and tell; mostly processes against a scripted server."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.http.scripted import Script, ScriptedServer, beside
from tests.bench.http.test_versus import weft
from weft.bench.http.prompts import HEAD_WORDS, Atoms, RepeatingRequests, make_requests
from weft.bench.http.rate_search import RunFile, keeps_up, pace
from weft.bench.http.variants import parse_variants
from weft.bench.http.workload import RequestSpec, arrival_times, of_trace
from weft.errors import OptionError

SMALL = ["--input-len", "20", "--output-len", "1"]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A word is a token."""
    with beside(lambda body, number: Script([0.0] * body.get("max_tokens", 1))) as server:
        server.count = lambda text: len(text.split())
        yield server


def prompts(server: ScriptedServer) -> list[str]:
    return [body["prompt"] for body in server.bodies if body.get("stream") and len(body["prompt"].split()) == 20]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ab


def test_no_run_of_ab_is_asked_with_the_words_of_another(server: ScriptedServer) -> None:
    variants = ["--variant", f"a: {server.url}", "--variant", f"b: {server.url}/v1"]
    done = weft("ab", *variants, "--repeats", "2", "--num-prompts", "5", *SMALL)
    assert done.returncode == 0, done.stderr
    assert len(prompts(server)) == 20
    assert len({*prompts(server)}) == 20


# sweep


def line(key: str = "0123456789abcdef", **beside: Any) -> str:
    return json.dumps({"key": key, **beside})


@pytest.mark.parametrize(
    "content", [b"my only notes", b'{"a": 1}', b"\x00\xff\xfe", b"\x89PNG\r\n\x1a\n\x00", b'["b"]\nx']
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "precious"
    file.write_bytes(content)
    with pytest.raises(OptionError, match="is not a run of weft bench sweep"):
        RunFile(file)
    assert file.read_bytes() == content


def test_half_a_line_of_ours_is_cut_off_when_there_is_another_to_write(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    text = line(rate=1.0) + "\n" + line()[:20]
    file.write_text(text)
    lines = RunFile(file)
    assert file.read_text() == text
    for rate in (2.0, 3.0):
        lines.get({"rate": rate}, lambda: {"completed": 1})
    assert [json.loads(one)["rate"] for one in file.read_text().splitlines()] == [1, 2, 3]


def test_a_whole_line_without_its_end_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    file.write_text(line(rate=1.0))
    RunFile(file).get({"rate": 2.0}, lambda: {"completed": 1})
    assert [json.loads(one)["rate"] for one in file.read_text().splitlines()] == [1, 2]


def test_what_did_not_work_at_all_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    for completed, expected in ((0, 0), (3, 3), (5, 3)):
        found = RunFile(file).get({"rate": 1.0}, lambda completed=completed: {"completed": completed})
        assert found["completed"] == expected
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("out", ["missing/sweep.jsonl", "."])
def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path, out: str) -> None:
    done = weft("sweep", "--variant", "x: http://127.0.0.1:9", "--rates", "1", "--out", str(tmp_path / out))
    assert done.returncode != 0
    assert "no server" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path) in done.stderr


def test_a_sweep_tells_what_failed_and_fails_where_all_did(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    command = ["sweep", "--variant", f"x: {server.url}", "--rates", "100", "--num-prompts", "5", "--out", str(file)]
    server.script = lambda body, number: Script(status=503 if len(body["prompt"].split()) == 20 else 200)
    done = weft(*command, *SMALL)
    assert done.returncode == 1, done.stderr
    head, row, error = done.stdout.splitlines()[:3]
    assert dict(zip(head.split(), row.split(), strict=True))["failed"] == "5"
    assert "5 x " in error
    assert "503" in error
    server.script = lambda body, number: Script([0.0])
    done = weft(*command, *SMALL)
    assert done.returncode == 0, done.stderr
    assert "x at 100 requests/s" in done.stderr, "measured again"
    head, row = done.stdout.splitlines()[:2]
    assert float(dict(zip(head.split(), row.split(), strict=True))["achieved_request_rate"]) == pytest.approx(100, 0.3)


def queued(count: int, rate: float, capacity: float, took: float) -> list[dict[str, Any]]:
    """Requests to a server that ends so many a second, each after `took` seconds at least."""
    found, free = [], 0.0
    for number in range(count):
        free = max(free, number / rate) + 1 / capacity
        found.append({"sent": number / rate, "end": free + took, "error": None})
    return found


def figures(requests: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, span = requests[-1]["end"], requests[-1]["sent"]
    rates = {"request_throughput": len(requests) / seconds, "achieved_request_rate": (len(requests) - 1) / span}
    return {**rates, "pace": pace(requests)}


def test_a_rate_is_held_only_if_answers_end_as_fast_as_requests_are_sent() -> None:
    assert keeps_up(figures(queued(600, 10, 12, 0.1)))
    assert keeps_up(figures(queued(600, 10, 12, 15.0))), "the last answers take their time in any run"
    assert not keeps_up(figures(queued(600, 10, 9, 0.1)))
    assert not keeps_up(figures(queued(600, 10, 9, 15.0)))
    assert keeps_up({"achieved_request_rate": None, "request_throughput": 1.0})
    assert not keeps_up({"achieved_request_rate": 2.0, "request_throughput": 1.0}), "a line of an older version"
    assert pace([]) is None


def test_a_rate_that_a_server_cannot_sustain_is_not_found(server: ScriptedServer, tmp_path: Path) -> None:
    free = 0.0

    def one_after_the_other(body: dict[str, Any], number: int) -> Script:
        """At most 20 a second."""
        nonlocal free
        if len(body["prompt"].split()) != 20:
            return Script([0.0])
        now = asyncio.get_running_loop().time()
        free = max(free, now) + 0.05
        return Script([free - now])

    server.script = one_after_the_other
    goals = ["--find", "10:80", "--goodput", "ttft:60000", "--duration", "2", "--pattern", "constant"]
    done = weft("sweep", "--variant", f"x: {server.url}", *goals, *SMALL, "--out", str(tmp_path / "s.jsonl"))
    assert done.returncode == 0, done.stderr
    rate = float(done.stdout.split(" up to ")[1].split()[0])
    assert 14 < rate < 24


def test_shares_are_told_as_they_are_given(server: ScriptedServer, tmp_path: Path) -> None:
    load = ["--find", "50:100", "--goodput", "ttft:5000", "--num-prompts", "5", "--hold", "0.995", *SMALL]
    done = weft("sweep", "--variant", f"x: {server.url}", *load, "--out", str(tmp_path / "s.jsonl"))
    assert "by 99.5% of the requests" in done.stdout, done.stderr


# when requests are sent


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(5))
def test_few_requests_have_the_rate_asked_for_as_well(burstiness: float, seed: int) -> None:
    times = arrival_times(100, 10.0, burstiness=burstiness, random=generator(seed))
    assert (len(times) - 1) / times[-1] == pytest.approx(10)


def test_a_ramp_reaches_its_end_with_the_duration() -> None:
    last = []
    for seed in range(200):
        times = arrival_times(None, 1.0, pattern="ramp", ramp_to=10.0, duration=60.0, random=generator(seed))
        assert times[-1] < 60
        last.append(np.sum(times > 55) / 5)
    assert np.mean(last) == pytest.approx(9.625, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.05, 1.0, 20.0])
def test_requests_in_bursts_fill_a_duration(burstiness: float) -> None:
    every = [
        arrival_times(None, 10.0, burstiness=burstiness, duration=30.0, random=generator(seed)) for seed in range(200)
    ]
    assert max(times[-1] for times in every) < 30
    last = np.mean([np.sum(times >= 25) / 5 for times in every])
    assert last == pytest.approx(10, rel=0.2)


def test_a_duration_is_passed_even_where_no_time_passes() -> None:
    assert len(arrival_times(None, 10.0, burstiness=1e-300, duration=1.0, random=generator())) <= 300
    assert len(arrival_times(None, 10.0, pattern="constant", duration=2.0, random=generator())) == 20
    assert len(arrival_times(5, 10.0, duration=2.0, random=generator())) == 5


def test_a_run_tells_how_fast_it_was_sent(server: ScriptedServer) -> None:
    done = weft("serve", "--url", server.url, "--request-rate", "50", "--num-prompts", "20", *SMALL)
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("sent at ")]
    assert float(told.split()[2]) == pytest.approx(50, rel=0.2)


# closed loops


def test_a_closed_loop_fills_its_time_with_prompts_that_are_all_new(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    load = ["--max-concurrency", "4", "--duration", "2", "--warmup", "0.5", "--cooldown", "0.2", *SMALL]
    done = weft("serve", "--url", server.url, *load, "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert len(prompts(server)) > 100
    assert found["warmup_s"] == 0.5
    assert found["duration"] == pytest.approx(1.3, abs=0.15)
    assert len({*prompts(server)}) == len(prompts(server))


def test_a_window_that_leaves_nothing_of_a_closed_loop_is_refused(server: ScriptedServer) -> None:
    done = weft("serve", "--url", server.url, "--max-concurrency", "4", "--duration", "2", "--warmup", "3", *SMALL)
    assert "leave nothing" in done.stderr
    assert not prompts(server)


def test_asks_without_end_are_as_long_and_begin_otherwise() -> None:
    async def count(texts: list[str]) -> list[int]:
        return [7 + len(text.split()) for text in texts]

    async def made() -> tuple[Atoms, RepeatingRequests]:
        atoms = await Atoms.find(count)
        specs = [RequestSpec(0.0, tokens, 1) for tokens in (9, 40, 300)] + [
            RequestSpec(0.0, 9, 1, text="what is that?")
        ]
        return atoms, RepeatingRequests(await make_requests(specs, atoms, 5, count), specs, atoms, 5)

    atoms, requests = asyncio.run(made())
    for turn in range(1, 4):
        for number in range(3):
            first, request = requests[number], requests[4 * turn + number]
            assert len(request.prompt.split()) == len(first.prompt.split()) == first.prompt_tokens - atoms.overhead
            assert request.prompt.split()[HEAD_WORDS:] == first.prompt.split()[HEAD_WORDS:]
    for number in (1, 2, 3):
        begun = {requests[4 * turn + number].prompt[:12] for turn in range(50)}
        assert len(begun) == 50
    assert requests[7].prompt.endswith("\nwhat is that?")
    began = time.perf_counter()
    for number in range(1000, 2000):
        requests[number]
    assert time.perf_counter() - began < 1, "this is done during a run"


def conversations(folder: Path, count: int) -> str:
    file = folder / "sharegpt.json"
    turns = [[{"from": "human", "value": f"q {number}"}, {"from": "gpt", "value": "a"}] for number in range(count)]
    file.write_text(json.dumps([{"conversations": pair} for pair in turns]))
    return str(file)


@pytest.mark.parametrize(("known", "asked", "sent"), [(120, None, 100), (7, 20, 7), (30, 20, 20)])
def test_so_many_conversations_are_sent(
    server: ScriptedServer, tmp_path: Path, known: int, asked: int | None, sent: int
) -> None:
    number = [] if asked is None else ["--num-prompts", str(asked)]
    done = weft("serve", "--url", server.url, "--sharegpt", conversations(tmp_path, known), *number)
    assert f"{sent} requests completed" in done.stdout, done.stderr
    assert ("has 7 conversations" in done.stderr) == (known == 7)


def test_conversations_fill_the_time_of_a_closed_loop(server: ScriptedServer, tmp_path: Path) -> None:
    load = ["--sharegpt", conversations(tmp_path, 3), "--max-concurrency", "2", "--duration", "1"]
    done = weft("serve", "--url", server.url, *load)
    assert done.returncode == 0, done.stderr
    asked = [body["prompt"] for body in server.bodies if body.get("stream") and "\n" in body["prompt"]]
    assert len(asked) > 20
    few = asked[:200]  # among thousands, two beginnings of four random words are equal now and then
    assert len({*few}) == len(few)


# compare


def test_files_of_other_tools_are_compared_and_differences_noted(tmp_path: Path) -> None:
    ours = {"completed": 3, "failed": 1, "request_rate": 4.0, "model_id": "m", "trace": None, "p50_ttft_ms": 10.0}
    theirs = {"completed": 3, "request_rate": "inf", "model_id": "other", "median_ttft_ms": 20.0, "max_gap_ms": "no"}
    files = []
    for name, found in (("a", ours), ("b", theirs), ("c", {**ours, "trace": "t.csv", "was_interrupted": True})):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(found))
    done = weft("compare", *map(str, files))
    assert done.returncode == 0, done.stderr
    for text in ("request_rate differs", "model_id differs", "trace differs", f"{files[2]} was interrupted", "x2.000"):
        assert text in done.stdout
    assert done.stdout.split("\nfailed")[1].split()[:3] == ["1", "-", "1"]
    assert "differs" not in weft("compare", str(files[0]), str(files[0])).stdout


# what is wrong is said in one line


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", '{"timestamp": 0, "input_length": 1e999, "output_length": 1, "hash_ids": []}'),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1e999]}'),
        ("t.jsonl", '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}'),
        ("t.jsonl", '{"timestamp": -Infinity, "input_length": 1, "output_length": 1, "hash_ids": []}'),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "1" * 200_000 + ",1,1\n"),
    ],
)
def test_a_trace_with_impossible_numbers_is_refused(tmp_path: Path, name: str, content: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(OptionError, match="cannot read the trace"):
        of_trace(file, rate_scale=1.0, duration=None, count=None)


def test_quotes_that_do_not_end_are_refused() -> None:
    with pytest.raises(OptionError, match="No closing quotation"):
        parse_variants(['x: cmd {port} "abc'])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "t.csv", "--input-len", "256"], "a trace has its own lengths"),
        (["--trace", "t.csv", "--output-len", "9"], "a trace has its own lengths"),
        (["--trace", "t.csv", "--pattern", "poisson"], "a trace has its own times"),
        (["--sharegpt", "s.json", "--input-len", "9"], "conversations have their own lengths"),
        (["--rate-scale", "1"], "there is no --trace"),
        (["--pattern", "constant"], "without --request-rate"),
        (["--burstiness", "1", "--max-concurrency", "3"], "without --request-rate"),
        (["--temperature", "inf"], "--temperature inf must be a number"),
        (["--json", "."], "is a folder"),
    ],
)
def test_options_without_effect_are_refused(arguments: list[str], message: str) -> None:
    done = weft("serve", "--url", "http://127.0.0.1:9", *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_patterns_need_no_rate_where_a_sweep_sets_it(server: ScriptedServer, tmp_path: Path) -> None:
    load = ["--rates", "50", "--num-prompts", "5", "--pattern", "constant", *SMALL]
    done = weft("sweep", "--variant", f"x: {server.url}", *load, "--out", str(tmp_path / "s.jsonl"))
    assert done.returncode == 0, done.stderr


def test_a_sweep_has_its_own_rates() -> None:
    done = weft("sweep", "--variant", "x: http://127.0.0.1:9", "--rates", "1", "--request-rate", "4")
    assert "a sweep has its rates from --rates" in done.stderr


def test_a_sweep_that_searches_takes_a_minute_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from weft.cli import main, rate_search

    seen = []
    monkeypatch.setattr(rate_search, "_sweep", lambda arguments, low, high: seen.append(arguments.duration) or 1)
    command = ["bench", "sweep", "--variant", "x: http://127.0.0.1:9", "--find", "1:2", "--goodput", "ttft:1"]
    for more in ([], ["--num-prompts", "9"], ["--duration", "5"]):
        main([*command, *more])
    assert seen == [60, float("inf"), 5]
