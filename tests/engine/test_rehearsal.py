"""Requests that come and go on a device whose costs are known."""

import pytest

from tests.engine.test_calibration import FAST, LIMITS, Device, PreparedAhead
from weft.engine.rehearsal import BURSTS, LONE_SEQUENCE, PHASES, rehearse
from weft.engine.residuals import Heat


def test_steps_of_a_rehearsal_are_those_of_service() -> None:
    device = PreparedAhead(Device(FAST, LIMITS))
    found = rehearse(device, **LIMITS, speed=40_000.0, phases=PHASES, seconds=5.0)
    assert device.in_flight == 0
    assert 5.0 <= device.device.now - 100 < 5.5
    for shape, seconds, _ in found:
        assert seconds == pytest.approx(FAST.predict(shape), rel=1e-6)
    decodes = [shape for shape, *_ in found if not shape.slices]
    mixed = [shape for shape, *_ in found if shape.slices and shape.decodes]
    assert len(decodes) > 10
    assert len(mixed) > 10
    assert max(shape.decodes for shape, *_ in found) > PHASES[-2].sequences / 2


def test_a_lone_stream_is_rehearsed_where_asked_for() -> None:
    found = rehearse(Device(FAST, LIMITS), **LIMITS, speed=40_000.0, phases=(LONE_SEQUENCE, *PHASES), seconds=5.0)
    lone = [shape for shape, *_ in found if shape.decodes + shape.slices == 1]
    assert sum(shape.slices for shape in lone) > 3
    assert sum(shape.decodes for shape in lone) > 30


def test_in_bursts_steps_with_and_without_prompts_follow_each_other_for_long() -> None:
    found = rehearse(Device(FAST, LIMITS), **LIMITS, speed=40_000.0, phases=BURSTS, seconds=4.0)
    heat, coolest, hottest = Heat(FAST), 1.0, 0.0
    for shape, seconds, idle in found:
        heat.note_idle(idle)
        if shape.slices:
            coolest, hottest = min(coolest, heat.share), max(hottest, heat.share)
        heat.note_step(shape, seconds)
    assert coolest < 0.1
    assert hottest > 0.6


def test_small_engines_are_rehearsed_within_their_limits() -> None:
    limits = LIMITS | {"max_num_seqs": 4, "num_blocks": 64, "max_model_len": 128}
    device = PreparedAhead(Device(FAST, limits))
    found = rehearse(device, **limits, speed=100.0, phases=PHASES, seconds=0.5)
    assert found
    assert device.in_flight == 0
