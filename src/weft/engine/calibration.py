"""Calibration: the measured cost of steps on one device, and the file that keeps it between starts."""

import hashlib
import json
import math
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.core import Coefficients, StepShape
from weft.engine.residuals import Residuals
from weft.errors import EngineError

FORMAT = 10  # version of the file; another version is measured again
GOOD = 0.06  # largest median error of a calibration that is called good
NOISY = 0.15  # median error or spread above this: the machine was busy during the measurement


@dataclass(frozen=True)
class Calibration:
    """Coefficients, and their error on held-out steps. (The factors of sizes are fitted to all rehearsed steps.)"""

    coefficients: Coefficients
    mean: float  # of log(measured / predicted)
    spread: float  # standard deviation of the same, with outliers clipped: the cost model's first margin
    error_p50: float  # of |measured / predicted - 1|
    error_p99: float
    steps: int  # measured
    largest: int  # tokens of the largest step measured
    device: str  # name
    submit: float = 0.0  # seconds that the host takes to submit a step of decodes
    submit_prefill: float = 0.0  # the same for a step with prefill slices
    wake: float = 0.0  # extra share of time that steps take after an idle time; see HostCost
    residuals: Residuals | None = None  # how steps in service differ from the prediction; None: not measured

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too busy during the measurement for a reliable result."""
        return self.error > NOISY

    @property
    def error(self) -> float:
        """The larger of spread and median error; a share."""
        return max(self.spread, self.error_p50)

    @property
    def quality(self) -> str:
        """A sentence about the quality, for people."""
        errors = f"steps are off by {self.error_p50:.1%} in the median and {self.error_p99:.1%} at the 99th percentile"
        if not self.is_noisy:
            return f"calibration is {'good' if self.error_p50 <= GOOD else 'fair'}: {errors}"
        return f"calibration is poor, the machine was busy: {errors}; it is measured anew at the next start"

    @property
    def decode_step(self) -> float:
        """Seconds of a step with one decode of 1,000 tokens of context."""
        return self.coefficients.predict(StepShape(tokens=1, decodes=1, context=1000))

    def prefill_speed(self, tokens: int) -> float:
        """Prefill tokens per second, in a step with the first `tokens` tokens of a prompt."""
        return tokens / max(self.coefficients.predict(self.coefficients.with_slice(StepShape(), 0, tokens)), 1e-9)


def calibration_file(
    path: Path,
    *,
    dtype: str,
    device: str,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> Path:
    """Path of the calibration of the model in `path`. Its name has a hash of everything that changes step times.

    The limits are part of the hash, because the cost of unmeasured steps is only a guess. `max_model_len` may depend on
    the memory that is free at the moment, so only its power of two counts.
    """
    import torch

    from weft import __version__

    config = (path / "config.json").read_bytes()
    key = [
        hashlib.sha256(config).hexdigest(),
        dtype.removeprefix("torch."),
        device,
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        __version__,
        _installed("triton"),
        _installed("flashinfer-python"),
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len.bit_length(),
    ]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return Path(home) / "weft" / "calibration" / f"{_readable_name(path)}-{digest}.json"


def load_calibration(file: Path) -> Calibration | None:
    """Returns the saved calibration, or None if there is none that this version can read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            return None
        coefficients = Coefficients(**data["coefficients"])
        residuals = None if data["residuals"] is None else Residuals(**data["residuals"])
        found = Calibration(**{**data, "coefficients": coefficients, "residuals": residuals})
        numbers = (found.mean, found.spread, found.error_p50, found.error_p99, found.steps, found.largest)
        good = all(math.isfinite(number) for number in numbers) and found.spread >= 0 and isinstance(found.device, str)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if good else None


def save_calibration(file: Path, calibration: Calibration) -> None:
    """Saves a calibration. Several processes may write at once: the last one wins, and no reader sees half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.stem, delete=False) as draft:
            json.dump({"format": FORMAT, **asdict(calibration)}, draft, indent=1)
        os.replace(draft.name, file)
    except OSError as error:
        raise EngineError(
            f"the calibration cannot be saved as {file}: {error.strerror}; point XDG_CACHE_HOME to a folder that weft "
            "may write to"
        ) from None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _readable_name(path: Path) -> str:
    """The model's name for people: `org--name` for a download from the hub, else the directory's name."""
    parts = path.resolve().parts
    hub = [part.removeprefix("models--") for part in parts if part.startswith("models--")]
    return re.sub(r"[^\w.-]+", "-", hub[-1] if hub else parts[-1])[:80] or "model"
