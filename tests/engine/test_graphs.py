"""Which sizes of steps are captured."""

import pytest

from weft.engine.graphs import decode_sizes, draw_sizes, mixed_sizes


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 200, 256, 1000])
def test_there_is_a_graph_for_any_number_of_rows(most: int) -> None:
    for sizes, waste in ((decode_sizes(most), 16), (draw_sizes(most), most // 2)):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            size = min(size for size in sizes if size >= rows)
            assert size - rows < max(2, rows, waste) or size == most


@pytest.mark.parametrize("most", [1, 24, 128, 2048, 16384])
def test_mixed_steps_are_captured_up_to_the_largest_or_to_what_the_host_is_slower_at(most: int) -> None:
    small, large = mixed_sizes(most, 1 << 20), mixed_sizes(most, 1 << 30)
    assert small[-1] == min(most, 8192)
    assert large[-1] == min(most, 2048)
