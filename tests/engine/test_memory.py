"""How much of a GPU's memory becomes KV cache."""

import pytest

from weft.engine.build import _kv_memory
from weft.engine.executor import DeviceMemory
from weft.engine.options import EngineOptions
from weft.errors import OptionError

MEMORY = DeviceMemory(total=1000, free=700, reserved=50)  # bytes: 300 are weights and what steps need


@pytest.mark.parametrize(("share", "expected"), [(0.9, 600), (0.95, 650), (0.96, 650), (1.0, 650), (0.3, 0), (0.2, 0)])
def test_a_share_leaves_room_for_what_is_taken_later(share: float, expected: int) -> None:
    assert _kv_memory(EngineOptions(gpu_memory_utilization=share), "cuda", MEMORY) == expected


def test_what_was_asked_for_leaves_that_room_too() -> None:
    assert _kv_memory(EngineOptions(kv_cache_memory_bytes=650), "cuda", MEMORY) == 650
    with pytest.raises(OptionError, match=r"kv_cache_memory_bytes=651 is above the 650 bytes .*: lower it"):
        _kv_memory(EngineOptions(kv_cache_memory_bytes=651), "cuda", MEMORY)


def test_there_may_be_no_room_at_all() -> None:
    assert _kv_memory(EngineOptions(), "cuda", MEMORY._replace(free=10)) == 0


@pytest.mark.parametrize(("free", "expected"), [(1000, 250), (100 << 30, 8 << 30)])
def test_on_a_cpu_other_programs_need_memory_too(free: int, expected: int) -> None:
    assert _kv_memory(EngineOptions(), "cpu", MEMORY._replace(free=free)) == expected
    assert _kv_memory(EngineOptions(kv_cache_memory_bytes=900), "cpu", MEMORY._replace(free=free)) == 900
