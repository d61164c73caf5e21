"""Requests that come and go on a device whose costs are known."""

import pytest

from tests.engine.test_calibration import FAST, LIMITS, Device, PreparedAhead
from weft.engine.rehearsal import ACTS, rehearse


def test_steps_of_a_rehearsal_are_those_of_service() -> None:
    device = PreparedAhead(Device(FAST, LIMITS))
    limits = {name: value for name, value in LIMITS.items() if name != "slots"}
    found = rehearse(device, **limits, wave=0, speed=40_000.0, seconds=5.0, with_lone=False, with_full=False)
    assert device.in_flight == 0
    assert 5.0 <= device.device.now - 100 < 5.5
    for shape, seconds, _ in found:
        assert seconds == pytest.approx(FAST.predict(shape), rel=1e-6)
    decodes = [shape for shape, *_ in found if not shape.slices]
    mixed = [shape for shape, *_ in found if shape.slices and shape.decodes]
    assert len(decodes) > 10
    assert len(mixed) > 10
    assert max(shape.decodes for shape, *_ in found) > ACTS[-2].streams / 2


def test_a_lone_stream_is_rehearsed_where_asked_for() -> None:
    limits = {name: value for name, value in LIMITS.items() if name != "slots"}
    found = rehearse(
        Device(FAST, LIMITS), **limits, wave=0, speed=40_000.0, seconds=5.0, with_lone=True, with_full=False
    )
    lone = [shape for shape, *_ in found if shape.decodes + shape.slices == 1]
    assert sum(shape.slices for shape in lone) > 3
    assert sum(shape.decodes for shape in lone) > 30


def test_small_engines_are_rehearsed_within_their_limits() -> None:
    limits = LIMITS | {"max_num_seqs": 4, "slots": 8, "num_blocks": 64, "max_model_len": 128}
    device = PreparedAhead(Device(FAST, limits))
    given = {name: value for name, value in limits.items() if name != "slots"}
    found = rehearse(device, **given, wave=0, speed=100.0, seconds=0.5, with_lone=False, with_full=False)
    assert found
    assert device.in_flight == 0
