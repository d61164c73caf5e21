"""The sampler against plain formulas, one row at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strength import examples
from weft.engine import sampling
from weft.engine.executor import SlotSetup
from weft.engine.params import SamplingParams
from weft.engine.sampling import Sampler, hashed_uniform

VOCAB = 32
EDGE = 1e-6
CPU = torch.device("cpu")


def setup(slot: int, prompt: list[int] = [1], output: list[int] = [], **params: Any) -> SlotSetup:  # noqa: B006
    wishes = SamplingParams(**params)
    return SlotSetup(slot, wishes, wishes.seed or 0, np.array(prompt, np.int32), np.array(output, np.int32), (0, 3))


def sampler(*setups: SlotSetup) -> Sampler:
    made = Sampler(8, VOCAB, CPU)
    for one in setups:
        made.setup(one)
    return made


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed))


def draw(made: Sampler, values: torch.Tensor, slots: list[int], positions: list[int]) -> list[int]:
    return made.sample(values, np.array(slots), np.array(positions)).tolist()


def many(values: torch.Tensor, **params: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How often each token is drawn from one row of logits, over 20,000 positions."""
    made = sampler(setup(0, **params))
    positions = np.arange(20_000)
    tokens = made.sample(values.expand(len(positions), -1), np.zeros(len(positions), np.int64), positions)
    return np.bincount(tokens.numpy(), minlength=VOCAB)


def test_the_noise_is_uniform_and_depends_on_seed_and_position() -> None:
    positions = np.arange(50_000)
    seeds = np.full(50_000, 5, np.uint64)
    one = hashed_uniform(seeds, positions)
    other = hashed_uniform(seeds + np.uint64(1), positions)
    assert one.min() >= 0
    assert one.max() < 1
    assert np.histogram(one, bins=20)[0] == pytest.approx(np.full(20, 2500), abs=250)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.02
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    values = logits(1)
    expected = torch.softmax(values[0].double() / temperature, -1).numpy()
    assert many(values, temperature=temperature, seed=1) / 20_000 == pytest.approx(expected, abs=0.015)


def test_temperature_zero_takes_the_likeliest_also_beside_others() -> None:
    values = logits(3)
    made = sampler(setup(0, temperature=0), setup(1, seed=1), setup(2, temperature=0))
    assert draw(made, values[:1], [0], [5]) == [int(values[0].argmax())]
    mixed = draw(made, values, [0, 1, 2], [5, 5, 5])
    assert (mixed[0], mixed[2]) == (int(values[0].argmax()), int(values[2].argmax()))


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(0, 50),
    st.integers(0, VOCAB + 5),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    st.floats(0.2, 3.0),
)
def test_only_tokens_that_the_limits_keep_are_drawn(
    seed: int, top_k: int, top_p: float, min_p: float, t: float
) -> None:
    values = logits(1, seed)
    made = sampler(setup(0, temperature=t, top_k=top_k, top_p=top_p, min_p=min_p))
    kept = set(np.flatnonzero(torch.isfinite(made._truncate(values / t, np.array([0])))[0].numpy()).tolist())
    counts = many(values, temperature=t, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert set(np.flatnonzero(counts).tolist()) <= kept

    probabilities = torch.softmax(values[0].double() / t, -1).tolist()
    order = sorted(range(VOCAB), key=lambda token: -probabilities[token])

    def left(edge: float) -> set[int]:
        likely = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]] * (1 + edge)]
        likely = likely[:top_k] if top_k else likely
        masses = [probabilities[token] for token in likely]
        before = np.cumsum(masses) - masses
        return {
            order[0],
            *(token for token, mass in zip(likely, before, strict=True) if mass < (top_p - edge) * sum(masses)),
        }

    # What is on the very border of min_p or top_p may fall either way in floating point.
    assert left(EDGE) <= kept <= left(-EDGE)


def test_penalties_are_those_of_the_formula_and_follow_what_is_sampled() -> None:
    values = logits(1)
    made = sampler(
        setup(
            2,
            prompt=[4, 5, 5],
            output=[6, 6, 7],
            temperature=0,
            repetition_penalty=1.5,
            frequency_penalty=0.5,
            presence_penalty=0.25,
        )
    )
    counts = {6: 2, 7: 1}
    for position in range(6, 12):
        expected = values[0].clone()
        for token in {4, 5, *counts}:
            expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        for token, count in counts.items():
            expected[token] -= 0.5 * count + 0.25
        (token,) = draw(made, values, [2], [position])
        assert token == int(expected.argmax())
        counts[token] = counts.get(token, 0) + 1


def test_a_slot_s_next_request_inherits_nothing() -> None:
    values = logits(1)
    fresh = sampler(setup(1, temperature=0))
    used = sampler(setup(1, temperature=0, presence_penalty=2.0, logit_bias={9: 50.0}, min_tokens=10))
    for position in range(1, 8):
        draw(used, values, [1], [position])
    used.setup(setup(1, temperature=0))
    assert draw(used, values, [1], [20]) == draw(fresh, values, [1], [20])


def test_memory_for_histories_is_known_before_it_is_taken() -> None:
    made = sampler(setup(1, temperature=0.5))
    assert made.later_bytes == len(made.temperature) * VOCAB * 5
    made.setup(setup(2, temperature=0, presence_penalty=2.0))
    taken = (made._history._counts, made._history._seen)
    assert sum(one.nbytes for one in taken) == len(made.temperature) * VOCAB * 5
    made.setup(setup(3, temperature=0, presence_penalty=2.0))
    assert made.later_bytes == 0
    assert made._history._counts is taken[0]  # nothing grows in service
    made.close()
    assert made._history._counts.nbytes == made._history._seen.nbytes == 0


def test_a_slot_s_next_request_with_penalties_inherits_none() -> None:
    values = logits(1)
    wish = {"temperature": 0, "presence_penalty": 2.0, "repetition_penalty": 1.9}
    used = sampler(setup(1, prompt=[3, 4], output=[9, 9], **wish))
    seen = [draw(used, values, [1], [position])[0] for position in range(4, 8)]
    used.setup(setup(1, prompt=[5], **wish))
    fresh = sampler(setup(1, prompt=[5], **wish))
    assert len({*seen}) > 2
    for position in range(1, 8):
        assert draw(used, values, [1], [position]) == draw(fresh, values, [1], [position])


def test_bias_and_the_ban_of_stop_tokens_before_min_tokens() -> None:
    values = torch.zeros((1, VOCAB))
    values[0, 3] = 9.0  # a stop id
    values[0, 8] = 5.0
    made = sampler(setup(0, prompt=[1, 1], temperature=0, min_tokens=2, logit_bias={8: 1.0, 9: 5.5}))
    assert [draw(made, values, [0], [p])[0] for p in (2, 3, 4)] == [8, 8, 3]


def test_company_and_order_of_rows_do_not_matter() -> None:
    values = logits(4, seed=3)
    setups = [
        setup(0, seed=1),
        setup(3, seed=2, top_p=0.7),
        setup(5, seed=3, top_k=3, frequency_penalty=1.0, output=[2, 2]),
        setup(6, temperature=0, logit_bias={2: 4.0}),
    ]
    alone = [draw(sampler(one), values[i : i + 1], [one.slot], [10 + i])[0] for i, one in enumerate(setups)]
    together = draw(sampler(*setups), values, [one.slot for one in setups], [10, 11, 12, 13])
    backwards = draw(sampler(*setups), values.flip(0), [one.slot for one in reversed(setups)], [13, 12, 11, 10])
    assert together == alone == backwards[::-1]


def test_log_probabilities_are_the_model_s_own_whatever_shapes_the_choice() -> None:
    values = logits(2)
    made = sampler(setup(0, temperature=0, logprobs=3, logit_bias={7: 80.0}), setup(1, temperature=0))
    tokens = made.sample(values, np.array([0, 1]), np.array([4, 4]))
    assert made.rows_with_logprobs(np.array([0, 1])).tolist() == [0]
    found = made.compute_logprobs(values[:1], tokens[:1], np.array([0])).read()
    expected = torch.log_softmax(values[0], -1)
    assert found[0].token == 7
    assert found[0].logprob == pytest.approx(float(expected[7]), abs=1e-5)
    assert found[0].rank == int((expected > expected[7]).sum()) + 1
    assert list(found[0].top) == expected.topk(3).indices.tolist()
    assert list(found[0].top.values()) == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_log_probabilities_come_in_pieces_of_which_each_row_gets_as_many_as_it_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = logits(5)
    made = sampler(*(setup(slot, logprobs=wanted) for slot, wanted in enumerate([3, 0, 5, 1, 2])))
    tokens, slots = torch.tensor([4, 3, 2, 1, 0]), np.arange(5)
    whole = made.compute_logprobs(values, tokens, slots).read()
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", 2 * VOCAB)
    pending = made.compute_logprobs(values, tokens, slots)
    assert [len(chunk.wanted) for chunk in pending.chunks] == [2, 2, 1]
    assert pending.read() == whole
    assert [(one.token, len(one.top)) for one in whole] == [(4, 3), (3, 0), (2, 5), (1, 1), (0, 2)]


def test_prompt_log_probabilities_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 1, 9, 30, 2, 2, 8]
    made = sampler(setup(0, prompt=prompt, prompt_logprobs=2))
    hidden = logits(7)
    sizes = []

    def to_logits(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows

    whole = made.compute_prompt_logprobs(to_logits, hidden, 0, 0).read()
    monkeypatch.setattr(sampling, "CHUNK_ELEMENTS", 2 * VOCAB)
    pieces = made.compute_prompt_logprobs(to_logits, hidden, 0, 0).read()
    assert whole == pieces
    assert sizes == [6, 2, 2, 2]
    assert [one.token for one in whole] == prompt[1:]
    assert whole[2].logprob == pytest.approx(float(torch.log_softmax(hidden[2], -1)[30]), abs=1e-6)
    # the second slice of a prompt: hidden states from position 4 on
    assert made.compute_prompt_logprobs(to_logits, hidden[4:], 0, 4).read() == whole[4:]
