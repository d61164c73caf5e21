"""A machine that takes all work in proportion, without lumps: what `slo` promises on it, it keeps exactly."""

from weft.core import Coefficients
from weft.sim.profiles import Profile

SMOOTH = Profile(
    name="smooth",
    origin="roughly Llama-3-8B on one H200, after published figures of other engines",
    coefficients=Coefficients(
        fixed=6e-4, weights=4.3e-3, token=2.35e-5, pair=8.5e-10, slice=2e-5, decode=1.1e-5, context=3.2e-8, reach=3.2e-8
    ),
    max_model_len=131_072,
    kv_tokens=800_000,
    block_size=16,
    max_num_seqs=1024,
    max_num_batched_tokens=16_384,
)
