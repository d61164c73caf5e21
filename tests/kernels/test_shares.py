"""How decodes' contexts are shared out; no GPU needed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.shares import MOST_SPLITS, SHARE_TILE, divide, most_shares

positions = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 100_000)), max_size=40)


@given(positions, st.one_of(st.none(), st.integers(1, 5000)), st.integers(1, 300))
def test_every_key_that_a_row_sees_is_in_one_share(drawn: list[int], window: int | None, wanted: int) -> None:
    where = np.array(drawn, np.int64)
    slots = np.arange(len(drawn))[::-1] + 7
    shares = divide(slots, where, window, wanted)
    assert len(shares.row) <= most_shares(len(drawn), wanted)
    assert sorted(shares.result.tolist()) == list(range(len(shares.row)))
    assert (np.diff(shares.end - shares.begin) <= 0).all(), "the longest first"
    for row, position in enumerate(drawn):
        mine = np.flatnonzero(shares.row == row)
        mine = mine[np.argsort(shares.result[mine])]
        assert (shares.slot[mine] == slots[row]).all()
        assert (shares.splits[mine] == len(mine)).all()
        assert len(mine) <= MOST_SPLITS
        assert shares.result[mine].tolist() == (shares.first[mine[0]] + np.arange(len(mine))).tolist()
        assert shares.begin[mine[0]] == (0 if window is None else max(0, position + 1 - window))
        assert shares.end[mine[-1]] == position + 1
        assert (shares.begin[mine[1:]] == shares.end[mine[:-1]]).all(), "no key twice, and none left out"
        assert (shares.end[mine] > shares.begin[mine]).all()


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=40), st.integers(1, 300))
def test_no_share_is_much_longer_than_the_average(drawn: list[int], wanted: int) -> None:
    shares = divide(np.arange(len(drawn)), np.array(drawn, np.int64), None, wanted)
    fair = (sum(drawn) + len(drawn)) / wanted + (len(drawn) / wanted + 1) * SHARE_TILE  # rows begin new tiles
    longest = max(max(drawn) / MOST_SPLITS + SHARE_TILE, fair)
    assert (shares.end - shares.begin).max() <= longest
