"""When requests come and how long they are; no server needed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench.http.workload import (
    Listed,
    LogNormal,
    RequestSpec,
    Uniform,
    arrival_times,
    cut,
    drawn,
    load_pairs,
    of_sharegpt,
    of_trace,
    parse_lengths,
)
from weft.errors import OptionError
from weft.sim.traces import LeftOut

COUNT = 20_000  # draws of the statistical tests; a mean of them is within 3 % or so
rates = st.floats(0.01, 1000)


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def spread(times: np.ndarray) -> float:
    """Standard deviation of the intervals over their mean."""
    steps = np.diff(times)
    return float(steps.std() / steps.mean())


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float) -> None:
    times = arrival_times(COUNT, 8.0, burstiness=burstiness, random=generator())
    assert times[-1] / (COUNT - 1) == pytest.approx(1 / 8, rel=0.1)
    assert spread(times) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_constant_pattern_has_even_intervals() -> None:
    assert arrival_times(4, 2.0, pattern="constant", random=generator()).tolist() == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize("pattern", ["poisson", "constant"])
def test_an_infinite_rate_asks_for_all_at_once(pattern: str) -> None:
    assert arrival_times(3, math.inf, pattern=pattern, random=generator()).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("begin", "end"), [(2.0, 10.0), (10.0, 2.0), (5.0, 5.0)])
def test_a_ramp_changes_its_rate_linearly_in_time(begin: float, end: float) -> None:
    times = arrival_times(COUNT, begin, pattern="ramp", ramp_to=end, random=generator())
    seconds = 2 * COUNT / (begin + end)
    assert times[-1] == pytest.approx(seconds, rel=0.1)
    quarters = np.histogram(times, bins=4, range=(0, seconds))[0] / (seconds / 4)
    expected = [begin + (end - begin) * middle for middle in (0.125, 0.375, 0.625, 0.875)]
    assert quarters == pytest.approx(expected, rel=0.1)
    early = times[times < seconds / 50]  # so short a part has nearly one rate: it is a Poisson process there
    assert spread(early) == pytest.approx(1, rel=0.3)


@given(st.integers(0, 50), rates, rates, st.integers(0, 2**32))
def test_times_begin_at_zero_and_never_go_back(count: int, rate: float, ramp_to: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    for times in (
        arrival_times(count, rate, random=random),
        arrival_times(count, rate, pattern="constant", random=random),
        arrival_times(count, rate, pattern="ramp", ramp_to=ramp_to, random=random),
    ):
        assert len(times) == count
        assert np.isfinite(times).all()
        assert (times[:1] == 0).all()
        assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize(
    ("rate", "options", "named"),
    [
        (0.0, {}, "rate is 0;"),
        (math.nan, {}, "rate is nan"),
        (1.0, {"burstiness": 0.0}, "burstiness is 0;"),
        (1.0, {"burstiness": math.inf}, "burstiness is inf"),
        (1.0, {"burstiness": 2.0, "pattern": "constant"}, "burstiness is 2, but a constant pattern"),
        (1.0, {"pattern": "waves"}, "'waves'; known: poisson, constant, ramp"),
        (1.0, {"ramp_to": 2.0}, "ramp to 2, but the pattern is poisson"),
        (1.0, {"pattern": "ramp"}, "from a rate of 1 to nothing"),
        (1.0, {"pattern": "ramp", "ramp_to": -1.0}, "to -1"),
        (math.inf, {"pattern": "ramp", "ramp_to": 1.0}, "rate of inf"),
    ],
)
def test_arrivals_that_make_no_sense_are_refused(rate: float, options: dict, named: str) -> None:
    with pytest.raises(OptionError, match=named):
        arrival_times(3, rate, random=generator(), **options)


def test_lengths_are_read_from_their_text(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("5\n\n 7 \n9\n")
    assert parse_lengths("128", "--output-tokens") == Uniform(128, 128)
    assert parse_lengths("100:1024", "--output-tokens") == Uniform(100, 1024)
    assert parse_lengths("lognormal:500,1.2", "--output-tokens") == LogNormal(500, 1.2)
    assert parse_lengths(str(file), "--output-tokens") == Listed((5, 7, 9))


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-3", "12x", "1.5", "9:3", "0:3", "1:2:3", "9999999999", "１２", "missing.txt", "x" * 5000),
        *("lognormal:500", "lognormal:0,1", "lognormal:5,-1", "lognormal:5,nan", "lognormal:nan,1", "normal:5,1"),
    ],
)
def test_a_malformed_length_is_named_with_its_option(text: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_lengths(text, "--output-tokens")
    assert f"--output-tokens {text!r}" in str(raised.value)


def test_a_fixed_and_a_uniform_length_stay_within_their_ends() -> None:
    assert set(Uniform(128, 128).draw(100, generator()).tolist()) == {128}
    assert set(Uniform(3, 6).draw(1000, generator()).tolist()) == {3, 4, 5, 6}


def test_a_lognormal_length_has_its_median_and_sigma() -> None:
    lengths = LogNormal(500, 1.2).draw(COUNT, generator())
    assert np.median(lengths) == pytest.approx(500, rel=0.1)
    assert np.log(lengths).std() == pytest.approx(1.2, rel=0.1)


@given(st.floats(1, 1e9), st.floats(0, 10), st.integers(0, 2**32))
def test_a_lognormal_length_is_at_least_one(median: float, sigma: float, seed: int) -> None:
    assert (LogNormal(median, sigma).draw(100, np.random.default_rng(seed)) >= 1).all()


def test_lengths_of_a_file_come_in_its_order_and_begin_again() -> None:
    assert Listed((5, 7, 9)).draw(5, generator()).tolist() == [5, 7, 9, 5, 7]


def test_pairs_of_a_file_stay_together(tmp_path: Path) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text("10 1\n20,2\n30\t3\n")
    specs = drawn(4, np.arange(4.0), *load_pairs(file), generator())
    assert specs == [RequestSpec(0, 10, 1), RequestSpec(1, 20, 2), RequestSpec(2, 30, 3), RequestSpec(3, 10, 1)]


@pytest.mark.parametrize(("content", "named"), [("5\n7 8\n", "line 2: '7 8'"), ("5\nx\n", "line 2"), ("0", "line 1")])
def test_a_malformed_line_of_lengths_is_named(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    with pytest.raises(OptionError, match=named):
        parse_lengths(str(file), "--output-tokens")


def test_a_file_of_lengths_without_pairs_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pairs.txt"
    for content, named in (("\n", "no lengths"), ("10 1\n20\n", "line 2: '20' is not two whole numbers")):
        file.write_text(content)
        with pytest.raises(OptionError, match=named):
            load_pairs(file)
    with pytest.raises(OptionError, match="cannot read"):
        load_pairs(tmp_path / "missing")


def test_drawn_wishes_have_the_given_times_and_lengths() -> None:
    specs = drawn(3, np.array([0.0, 0.5, 2.0]), Uniform(9, 9), Uniform(1, 4), generator())
    assert [spec.at for spec in specs] == [0, 0.5, 2]
    assert {spec.prompt_tokens for spec in specs} == {9}
    assert all(1 <= spec.output_tokens <= 4 and isinstance(spec.output_tokens, int) for spec in specs)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.000000,100,10
2024-05-10 00:00:04.000000,200,20
2024-05-10 00:00:08.000000,300,30
"""


def test_an_azure_trace_is_cut_on_its_own_clock_and_then_sped_up(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    assert of_trace(file, rate_scale=2.0, duration=6.0, count=None) == [
        RequestSpec(0, 100, 10),
        RequestSpec(2, 200, 20),
    ]
    assert of_trace(file, rate_scale=1.0, duration=None, count=1) == [RequestSpec(0, 100, 10)]


def test_a_mooncake_trace_keeps_its_shared_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    specs = of_trace(file, rate_scale=1.0, duration=None, count=None)
    assert specs == [RequestSpec(0, 600, 5, (1, 2)), RequestSpec(3, 700, 6, (1, 3))]


@pytest.mark.parametrize("options", [{"rate_scale": 0.0}, {"duration": -1.0}, {"count": 0}, {"rate_scale": math.nan}])
def test_parts_of_a_trace_that_make_no_sense_are_refused(tmp_path: Path, options: dict) -> None:
    with pytest.raises(OptionError, match="must be above 0"):
        of_trace(tmp_path / "azure.csv", **{"rate_scale": 1.0, "duration": None, "count": None, **options})


def turns(*spoken: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": speaker, "value": text} for speaker, text in spoken]}


def test_a_sharegpt_conversation_gives_its_first_question_and_its_answer(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    conversations = [
        turns(("human", "how are you"), ("gpt", "very well"), ("human", "good")),
        turns(("user", "and you"), ("assistant", "I do not know that")),
        turns(("gpt", "I speak first"), ("human", "no")),
        turns(("human", "nobody answers")),
        turns(("human", "  "), ("gpt", "what?")),
        turns(("human", "hello"), ("gpt", "")),
        turns(("human", "twice"), ("human", "in a row")),
        turns(),
    ]
    file.write_text(json.dumps(conversations))
    specs = of_sharegpt(file, None, generator())
    assert sorted(specs, key=lambda spec: spec.text) == [
        RequestSpec(0, 0, 0, text="and you", answer="I do not know that"),
        RequestSpec(0, 0, 0, text="how are you", answer="very well"),
    ]
    assert len(of_sharegpt(file, 1, generator())) == 1


def test_sharegpt_conversations_come_in_an_order_that_the_seed_decides(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([turns(("human", f"question {number}"), ("gpt", "answer")) for number in range(50)]))
    one, same = (of_sharegpt(file, 20, generator()) for _ in range(2))
    assert one == same
    assert one != of_sharegpt(file, 20, np.random.default_rng(8))
    assert len({spec.text for spec in one}) == 20


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[{", "is not JSON.*line 1"),
        ("{}", "not a list"),
        ("[]", "has no conversation"),
        (json.dumps([turns(), {"turns": []}]), "conversation 1: there is no list"),
        (json.dumps([[]]), "conversation 0: there is no list"),
        (json.dumps([{"conversations": [{"from": "human"}]}]), "conversation 0: a turn"),
        (json.dumps([{"conversations": ["hello"]}]), "conversation 0: a turn"),
    ],
)
def test_a_malformed_sharegpt_file_is_named_with_the_place(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(content)
    with pytest.raises(OptionError, match=f"sharegpt.json.*{named}"):
        of_sharegpt(file, None, generator())


def test_wishes_that_do_not_fit_are_left_out_and_counted() -> None:
    specs = [RequestSpec(0, 6, 4), RequestSpec(1, 6, 5), RequestSpec(2, 1, 1)]
    kept, left_out = cut(specs, 10)
    assert (kept, left_out) == ([RequestSpec(0, 6, 4), RequestSpec(2, 1, 1)], LeftOut(1, 3, 11, 10))
    assert cut(kept, 10) == (kept, None)
