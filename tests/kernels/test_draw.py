"""Tokens that are drawn, against cumulative distributions in float64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.kernels.device import DEVICE, NAN, normal, permutation
from tests.strength import is_long
from weft import SamplingParams
from weft.engine.executor import SlotSetup
from weft.engine.sampling import Sampler, hashed_uniform
from weft.kernels import draw
from weft.kernels.ranks import UNIT
from weft.kernels.truncate import ROUNDS, SLACK, TruncationParams, truncate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

ALL = 2**31 - 1  # top_k that leaves everything
THOROUGH = DEVICE.type == "cuda" or is_long()  # the interpreter takes a hundred times as long


def test_draw(dtype: torch.dtype) -> None:
    for vocab in (5, 2048, 5000, 151936) if DEVICE.type == "cuda" else (5, 2048, 5000):
        rows = 12
        logits = normal(dtype, rows, vocab) * 3
        logits[1] = 0  # all equal
        logits[2, vocab // 2 :] = -torch.inf
        logits[3] = -torch.inf
        logits[3, vocab - 2] = -7
        logits[4, : vocab // 2 + 1] = -torch.inf
        logits[5, [1, vocab - 1]] = logits[5].max() + 1
        temperature = torch.tensor([0.0, 1.0, 5.0, 0.7, 1e-5, 0.0, 0.3, 1.0, 2.0, 1.0, 1.0, 5.0], device=DEVICE)
        uniform = torch.rand(rows, dtype=torch.float64)
        uniform[7], uniform[8], uniform[2], uniform[9] = 0.0, 1 - 2.0**-32, 1 - 2.0**-32, 1 - 2.0**-24
        _assert_draws(logits, temperature, uniform)
        _assert_draws(logits, torch.zeros_like(temperature), uniform)
    hopeless = torch.full((2, 3000), -torch.inf, dtype=dtype, device=DEVICE)
    hopeless[1] = NAN
    for temperature in (torch.ones(2, device=DEVICE), torch.zeros(2, device=DEVICE)):
        tokens = _draw(hopeless, temperature, _noise(torch.rand(2)))
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < 3000


def test_a_number_on_a_border_belongs_to_the_token_behind_it(dtype: torch.dtype) -> None:
    tokens = [1, 2, 2047, 2048, 2049, 4095]
    logits = torch.zeros((len(tokens), 4096), dtype=dtype, device=DEVICE)
    uniform = torch.tensor(tokens, dtype=torch.float64) / 4096
    assert _draw(logits, torch.ones(len(tokens), device=DEVICE), _noise(uniform)).tolist() == tokens


def test_where_rounding_leaves_nobody_the_last_that_can_be_is_drawn() -> None:
    """Of the tie that is kept, the row's units and those of its tile say something different. Here are rows where the
    highest uniform number lies between the two."""
    generator = np.random.default_rng(0)
    second = generator.uniform(-0.2, 0, 4000).astype(np.float32)
    tie = generator.uniform(-0.5, -0.2, 4000).astype(np.float32)
    factor, power, in_tile = np.exp(second), np.exp(tie), np.exp(tie - second)
    highest = 1 - 2.0**-32
    target = (highest * (1 + factor.astype(np.float64) + power) - 1) / factor
    chosen = np.flatnonzero(target > 1 + in_tile.astype(np.float64) + 1e-9)[:6]
    rows = len(chosen)
    assert rows == 6
    logits = torch.full((rows, 4096), -torch.inf, device=DEVICE)
    logits[:, 7] = 0.0
    logits[:, 2048] = torch.from_numpy(second[chosen]).to(DEVICE)
    logits[:, 2049] = logits[:, 2060] = torch.from_numpy(tie[chosen]).to(DEVICE)
    everything = (torch.full((rows,), value, device=DEVICE) for value in (2.0, -torch.inf))
    cuts = TruncationParams(torch.full((rows,), 3, dtype=torch.int32, device=DEVICE), *everything)
    noise = _noise(torch.full((rows,), highest, dtype=torch.float64))
    assert _draw(logits, torch.ones(rows, device=DEVICE), noise, cuts).tolist() == [2049] * rows


@pytest.mark.parametrize("step", [0.0, 0.5])  # between logits: with 0.5 most have the same as many others
@pytest.mark.parametrize("vocab", [3, 100, 2500, *([9000, 151936] if DEVICE.type == "cuda" else [])])
def test_what_is_truncated_is_what_the_cpu_truncates(dtype: torch.dtype, vocab: int, step: float) -> None:
    generator = np.random.default_rng(vocab)
    rows = 96 if DEVICE.type == "cuda" else 12
    logits = normal(dtype, rows, vocab) * 3
    logits = (logits / step).round() * step if step else logits
    logits[5], logits[6, vocab // 2 :] = 1.0, -torch.inf
    logits[7 : 7 + rows // 4, permutation(vocab)[:30]] += 12  # as a model: few that are likely
    kinds = {
        "top_k": [0, 1, 2, 20, vocab - 1, vocab + 1],
        "top_p": [1, 1e-13, 0.3141, 0.9077, 0.99913],
        "min_p": [0, 0.02, 0.5, 1],
    }
    asked = (["top_k"], ["top_p"], ["min_p"], list(kinds))
    for batch in range(len(asked) if THOROUGH else 1):  # every row asks for something else, in another order
        params = [
            SamplingParams(
                temperature=float(generator.choice([0, 0.2, 1, 3])),
                **{name: kinds[name][generator.integers(len(kinds[name]))] for name in asked[(row + batch) % 4]},
            )
            for row in range(rows)
        ]
        sampler = Sampler(rows, vocab, torch.device("cpu"))
        nothing = np.empty(0, np.int32)
        for row, one in enumerate(params):
            sampler.setup(SlotSetup(row, one, int(generator.integers(2**63)), nothing, nothing, ()))
        slots, positions = np.arange(rows), generator.integers(0, 1000, rows)
        expected = sampler.sample(logits.float().cpu(), slots, positions + 1)
        temperature, low, high, top_k, top_p, floor = torch.from_numpy(sampler.kernel_params).to(DEVICE)
        noise = draw.Noise(low, high, torch.from_numpy(positions).int().to(DEVICE))
        cuts = TruncationParams(top_k, top_p.view(torch.float32), floor.view(torch.float32))
        found = _draw(logits, temperature.view(torch.float32), noise, cuts)
        uniform = hashed_uniform(sampler.seed, positions + 1)
        for row in (found.cpu() != expected).nonzero().flatten().tolist():
            # Of many tokens each has so little that the rounding of float32 may decide between neighbours.
            cumulative = _cumulative(logits[row].double().cpu().numpy(), params[row])
            token, slack = int(found[row]), 2e-6 if vocab > 2500 else 0.0
            is_near = cumulative[token - 1] - slack <= uniform[row] < cumulative[token] + slack
            assert params[row].temperature > 0
            assert is_near, (row, params[row], token, int(expected[row]))


def test_who_asks_for_nothing_gets_what_it_would_get_alone(dtype: torch.dtype) -> None:
    """Bit by bit: other rows decide whether a step is truncated, and whether its logits are edited, in float32."""
    for vocab in (2500, 151936) if DEVICE.type == "cuda" else (2500,):
        rows = 512 if DEVICE.type == "cuda" else 6
        logits = normal(dtype, rows, vocab) * 3
        temperature = torch.full((rows,), 0.8, device=DEVICE)
        noise = _noise(torch.rand(rows))
        everything = (torch.full((rows,), value, device=DEVICE) for value in (2.0, -torch.inf))
        cuts = TruncationParams(torch.full((rows,), 2**31 - 1, dtype=torch.int32, device=DEVICE), *everything)
        alone = _draw(logits, temperature, noise)
        assert torch.equal(alone, _draw(logits, temperature, noise, cuts))
        assert torch.equal(alone, _draw(logits.float(), temperature, noise))
        assert torch.equal(alone, _draw(logits.float(), temperature, noise, cuts))


@pytest.mark.parametrize("vocab", [37, 5000] if DEVICE.type == "cuda" else [37, 130])
def test_borders(dtype: torch.dtype, vocab: int) -> None:
    """Distributions of many kinds, and few logits a tile, so that borders lie in every place of one."""
    generator, tile, rows = np.random.default_rng(vocab), 32, 1000 if DEVICE.type == "cuda" else 36 if THOROUGH else 15
    logits = normal(dtype, rows, vocab) * torch.from_numpy(generator.choice([0.1, 1, 3, 20], (rows, 1))).to(DEVICE)
    logits[::3] = (logits[::3] * 2).round() / 2  # many are equal
    logits[::7, vocab // 3 :] = -torch.inf
    logits[::11, permutation(vocab)[:5]] += 8
    logits[5], logits[6] = 1.0, -torch.inf
    logits[6, vocab - 3] = -4.0
    logits[8], logits[8, 1] = 0.0, -0.0
    heat = generator.choice([0.0, 0.3, 1.0, 4.0], rows)
    top_k = generator.choice([1, 2, 3, 5, vocab // tile + 1, vocab - 1, vocab, ALL, ALL], rows)
    top_p = generator.choice([2, 2, 1e-9, 0.2, 0.5, 0.9, 0.99, 0.99999], rows)
    min_p = generator.choice([0, 0, 1e-6, 0.01, 0.3, 1], rows)
    _assert_borders(logits.to(dtype), tile, heat, top_k, top_p, min_p)


def test_borders_in_odd_places(dtype: torch.dtype) -> None:
    at_each_distance = torch.full((40, 8), -torch.inf, device=DEVICE)  # below the top, with more ties than are kept
    at_each_distance[:, [0, 4, 5]] = 2 - torch.arange(1, 41, device=DEVICE)[:, None] / 100
    at_each_distance[:, 3] = 2.0
    _assert_borders(at_each_distance.to(dtype), 8, 1.0, 2)
    spread = torch.full((2, 32), -5.0, device=DEVICE)  # each of the highest in a tile of its own
    spread[:, [0, 9, 17]] = torch.tensor([3.0, 2.0, 1.0], device=DEVICE)
    _assert_borders(spread.to(dtype), 8, 1.0, np.array([2, 3]))
    low_tile = torch.full((1, 128), -0.6, device=DEVICE)  # all that top_k leaves out is there
    low_tile[0, :64] = 0.0
    low_tile[0, [100, 101]] = -1.0
    _assert_borders(low_tile.to(dtype), 64, 1.0, 127, 0.9)
    if dtype != torch.float32:  # the first number below min_p's border, which is none itself
        least = 3 + float(np.log(0.3))
        below = torch.tensor([least], dtype=dtype)
        below = below if float(below) < least else (below.view(torch.int16) - 1).view(dtype)
        logits = torch.tensor([[3.0, float(below), -9.0, -9.0]], dtype=dtype, device=DEVICE)
        _assert_borders(logits, 4, 1.0, min_p=0.3)


def test_top_p_of_equal_tokens_is_as_exact_as_can_be(dtype: torch.dtype) -> None:
    logits = torch.zeros((9, 10), dtype=dtype, device=DEVICE)
    tops = torch.zeros((9, 1), device=DEVICE)
    top_p = torch.arange(1, 10, device=DEVICE) / 10
    cuts = TruncationParams(
        torch.full((9,), 11, dtype=torch.int32, device=DEVICE),
        top_p.float(),
        torch.full((9,), -torch.inf, device=DEVICE),
    )
    sums = torch.full((9, 1), 10 * int(UNIT.value), device=DEVICE)
    border = truncate(logits, torch.ones(9, device=DEVICE), tops, sums, cuts, 2048)
    assert border.ties.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert border.sums.flatten().tolist() == [0] * 9


def test_noise() -> None:
    """Bit by bit that of the CPU."""
    from tests.kernels.hashing import hash_rows  # now, in the interpreter if there is no GPU

    random = np.random.default_rng(1)
    seeds = random.integers(0, 2**64, 1024, dtype=np.uint64)
    seeds[:5] = [0, 1, 2**32 - 1, 2**63, 2**64 - 1]
    positions = random.integers(0, 2**20, 1024)
    halves = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).T.copy()).to(DEVICE)
    found = torch.empty(1024, dtype=torch.float64, device=DEVICE)
    hash_rows[(1,)](*halves, torch.from_numpy(positions).int().to(DEVICE), found, N=1024)
    assert found.tolist() == hashed_uniform(seeds, positions).tolist()


def _assert_borders(
    logits: Tensor,
    tile: int,
    heat: NDArray[np.float64] | float,
    top_k: NDArray[np.int64] | int = ALL,
    top_p: NDArray[np.float64] | float = 2.0,
    min_p: NDArray[np.float64] | float = 0.0,
) -> None:
    """Which tokens are kept, and what is told of their tiles."""
    rows, vocab = logits.shape
    tiles = -(-vocab // tile)
    heat, top_p = (np.broadcast_to(np.asarray(each, np.float32), rows).copy() for each in (heat, top_p))
    top_k = np.broadcast_to(np.asarray(top_k, np.int32), rows).copy()
    with np.errstate(divide="ignore"):
        floor = np.broadcast_to(np.log(np.asarray(min_p)).astype(np.float32), rows).copy()
    values = np.full((rows, tiles * tile), -np.inf)
    values[:, :vocab] = logits.double().cpu().numpy()
    given = values.reshape(rows, tiles, tile)
    highest, divisor = given.max(-1), np.where(heat > 0, heat, 1.0)[:, None, None]
    tops = np.where(highest > -np.inf, highest, 0)[..., None]
    units = float(UNIT.value) * np.exp((given - tops) / divisor)
    temperature, tile_tops, sums = (
        torch.from_numpy(array).to(DEVICE)
        for array in (heat, highest.astype(np.float32), units.astype(np.int64).sum(-1))
    )
    cuts = TruncationParams(*(torch.from_numpy(array).to(DEVICE) for array in (top_k, top_p, floor)))
    border = truncate(logits, temperature, tile_tops, sums, cuts, tile)
    rank, ties, kept_sums, equal = (field.cpu().numpy() for field in border)

    bits = (values.astype(np.float32) + np.float32(0)).view(np.int32)
    ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ROUNDS[logits.dtype][0]
    ranks[:, vocab:] = -(2**31)
    above, at = ranks > rank[:, None], ranks == rank[:, None]
    kept = above | (at & (np.cumsum(at, 1) <= ties[:, None]))
    assert (equal == at.reshape(given.shape).sum(-1)).all()
    expected = np.where(above.reshape(given.shape), units, 0).sum(-1)
    assert np.allclose(kept_sums, expected, rtol=1e-5, atol=vocab)
    for row in range(rows):
        wrong = _wrongly_kept(values[row, :vocab], kept[row, :vocab], heat[row], top_k[row], top_p[row], floor[row])
        assert not wrong, (row, heat[row], top_k[row], top_p[row], floor[row], wrong)


def _wrongly_kept(
    logits: NDArray[np.float64], kept: NDArray[np.bool_], heat: float, top_k: int, top_p: float, floor: float
) -> list[int]:
    """Tokens that are and should not be, or the other way round, and so clearly that rounding does not excuse it."""
    heat = heat or 1.0
    order = np.argsort(-logits, kind="stable")
    over = logits - (logits.max() + floor * heat)  # min_p's border
    powers = np.where(over >= 0, np.exp((logits - logits.max()) / heat), 0.0)
    powers[order[top_k:]] = 0
    before = np.empty_like(powers)
    before[order] = np.cumsum(powers[order]) - powers[order]
    short = top_p * SLACK.value * powers.sum() - before  # top_p's
    expected = (powers > 0) & ((short > 0) | (np.arange(len(logits)) == order[0]))
    clear = (logits > -np.inf) & (np.abs(short) > 1e-7 * len(logits)) & (np.abs(over) > 1e-5)
    return np.flatnonzero((kept != expected) & clear).tolist()


def _cumulative(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """By token, of what is kept; behind the last one 0, which is what comes before the first."""
    order = np.argsort(-logits, kind="stable")
    scaled = (logits - logits[order[0]]) / (params.temperature or 1)
    powers = np.where(scaled >= np.log(max(params.min_p, 1e-300)), np.exp(scaled), 0.0)
    if 0 < params.top_k < len(logits):
        powers[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = np.cumsum(powers[order]) - powers[order]
        powers[order[1:][before[1:] >= params.top_p * powers.sum()]] = 0
    return np.append(np.cumsum(powers) / powers.sum(), 0.0)


def _assert_draws(logits: Tensor, temperature: Tensor, uniform: Tensor) -> None:
    rows = len(logits)
    noise = _noise(uniform)
    slots = permutation(rows + 4)[:rows].int()
    slots[-1] = -1
    last = torch.full((rows + 4,), -1, dtype=torch.int32, device=DEVICE)
    places = permutation(rows + 4)[:rows].int()
    returned = torch.full((rows + 4,), -1, dtype=torch.int32)
    returned = returned.pin_memory() if DEVICE.type == "cuda" else returned
    draw.draw(logits, temperature, noise, last, slots, returned, places)
    tokens = _draw(logits, temperature, noise)
    assert torch.equal(last[slots[:-1].long()], tokens[:-1])
    assert torch.equal(returned[places[:-1].long().cpu()], tokens[:-1].cpu())
    assert int((last >= 0).sum()) == int((returned >= 0).sum()) == rows - 1, "padding was written"
    heat = torch.where(temperature > 0, temperature, 1.0).double()
    cumulative = torch.softmax(logits.double() / heat[:, None], -1).cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        if temperature[row] == 0:
            best = logits[row].max()
            assert token == int((logits[row] == best).nonzero()[0])
            continue
        assert logits[row, token] > -torch.inf
        target, slack = float(uniform[row]), 1e-6
        assert float(cumulative[row, token]) >= target - slack
        assert token == 0 or float(cumulative[row, token - 1]) <= target + slack
        this = slice(row, row + 1)
        alone = _draw(logits[this], temperature[this], draw.Noise(*(field[this] for field in noise)))
        assert int(alone) == token, "depends on its company"


def _draw(logits: Tensor, temperature: Tensor, noise: draw.Noise, cuts: TruncationParams | None = None) -> Tensor:
    places = torch.arange(len(logits), dtype=torch.int32, device=DEVICE)
    tokens, last = torch.empty_like(places), torch.empty_like(places)
    draw.draw(logits, temperature, noise, last, places, tokens, places, cuts)
    return tokens


def _noise(uniform: Tensor) -> draw.Noise:
    """Seeds that hash to these numbers, for some positions: the hash can be turned round."""
    positions = np.random.default_rng(0).integers(0, 10**6, len(uniform))
    bits = (uniform.double().numpy() * 2**32).astype(np.uint64) << np.uint64(32)
    seeds = np.empty(len(uniform), np.uint64)
    for row, (wanted, position) in enumerate(zip(bits.tolist(), positions.tolist(), strict=True)):
        mixed = _unmix(wanted) ^ ((position + 1) * 0xD1342543DE82EF95) % 2**64
        seeds[row] = (_unmix(mixed) - 0x9E3779B97F4A7C15) % 2**64
    assert (hashed_uniform(seeds, positions + 1) == bits / 2.0**64).all()
    halves = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).T.copy())
    return draw.Noise(*halves.to(DEVICE), torch.from_numpy(positions).int().to(DEVICE))


def _unmix(bits: int) -> int:
    """What the finaliser of splitmix64 makes `bits` of."""
    bits = bits ^ (bits >> 31) ^ (bits >> 62)
    bits = bits * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    bits = bits ^ (bits >> 27) ^ (bits >> 54)
    bits = bits * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return bits ^ (bits >> 30) ^ (bits >> 60)
