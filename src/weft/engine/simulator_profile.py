"""`profile_of`: the profile of a model on a device for the simulator, which `weft simulate --profile` reads as JSON."""

from dataclasses import asdict
from typing import Any

from weft import __version__
from weft.engine.calibration import Calibration
from weft.engine.engine import Engine
from weft.engine.measure_host_cost import SubmitTimes, measure_host_cost


def profile_of(engine: Engine, calibration: Calibration, max_num_batched_tokens: int) -> dict[str, Any]:
    """Returns the calibration as measured, without later learning, and the limits of the engine."""
    scheduler = engine.loop.scheduler
    host = scheduler.policy.host
    if scheduler.policy.cost is None:  # the policy has no measured host cost
        submit = SubmitTimes(calibration.submit, calibration.submit_prefill)
        host = measure_host_cost(calibration.coefficients, submit, calibration.wake, is_served=True)
    return {
        "origin": f"measured with weft {__version__} on {calibration.device}: {calibration.steps} steps, error p50 "
        f"{calibration.error_p50:.1%}, p99 {calibration.error_p99:.1%}",
        "max_model_len": engine.max_model_len,
        "kv_tokens": scheduler.num_blocks * scheduler.block_size,
        "block_size": scheduler.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "coefficients": asdict(calibration.coefficients),
        "host": asdict(host),
        "mean": calibration.mean,
        "spread": calibration.spread,
        "residuals": None if calibration.residuals is None else asdict(calibration.residuals),
    }
