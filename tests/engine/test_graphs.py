"""Which sizes of steps are captured."""

import pytest

from weft.engine.graphs import decode_sizes, mixed_sizes, sampling_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 200, 256, 1000])
def test_there_is_a_graph_for_any_number_of_rows(most: int) -> None:
    for sizes in (decode_sizes(most), sampling_sizes(most)):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            assert min(size for size in sizes if size >= rows) < 2 * rows or rows == 1


def test_sizes_are_closer_together_where_a_row_more_costs_most() -> None:
    assert sampling_sizes(200) == [1, 2, 4, 8, 16, 32, 64, 128, 200]
    assert decode_sizes(300)[:6] == [1, 2, 4, 8, 16, 24]
    assert decode_sizes(300)[-3:] == [240, 256, 300]


@pytest.mark.parametrize("most", [1, 24, 128, 2048, 16384])
def test_mixed_steps_are_captured_up_to_the_largest_or_to_what_the_host_is_slower_at(most: int) -> None:
    small, large = mixed_sizes(most, 1 << 20), mixed_sizes(most, 1 << 30)
    assert small[-1] == min(most, 8192)
    assert large[-1] == min(most, 2048)
