"""Hardware profiles: step costs of a model on a device, and the limits of the engine (KV cache, batch, context)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core import Coefficients, CostModel, HostCost
from weft.core.cost import MOST_SPREAD
from weft.engine.residuals import Residuals
from weft.errors import OptionError

FOLDER = Path(__file__).parent / "profiles"
FIDELITY = {"date", "device", "slice", "policy", "errors"}  # required keys of a `weft bench fidelity` entry
NO_HOST = HostCost()


@dataclass(frozen=True)
class Profile:
    name: str
    origin: str  # "measured" or "fitted", and to which data
    coefficients: Coefficients
    max_model_len: int  # tokens
    kv_tokens: int  # capacity of the KV cache
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    host: HostCost = NO_HOST  # host time of steps
    # Error of the coefficients on the measured steps, log(measured / predicted): mean, and standard deviation without
    # hiccups. None: not in the profile.
    mean: float = 0.0
    spread: float | None = None
    residuals: Residuals | None = None  # how steps in service differ from the coefficients; None: not measured
    fidelity: tuple[dict[str, Any], ...] = ()  # results of `weft bench fidelity`, the oldest first

    def cost_model(self) -> CostModel:
        """The initial cost model of a scheduler on this device."""
        if self.spread is None:
            return CostModel(self.coefficients, self.mean, host=self.host)
        return CostModel(self.coefficients, self.mean, min(self.spread, MOST_SPREAD), host=self.host)


def known_profiles() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def profile_path(name: str) -> Path:
    """The file of a profile: one that ships with weft, by its name, or any JSON file, by its path."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        raise OptionError(f"unknown profile {name!r}; known: {', '.join(known_profiles())}, or a path to a JSON file")
    return path


def load_profile(name: str) -> Profile:
    """Loads a profile by name, or from a JSON file."""
    path = profile_path(name)
    try:
        return read_profile(path.stem, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OptionError(f"profile {path}: {error}") from None


def read_profile(name: str, data: dict[str, Any]) -> Profile:
    """A profile from its JSON object. Bad data raises ValueError, TypeError or KeyError."""
    coefficients = Coefficients(**data["coefficients"])
    host = HostCost(**data.get("host", {}))
    residuals = None if data.get("residuals") is None else Residuals(**data["residuals"])
    fidelity = tuple(data.get("fidelity", ()))
    for one in fidelity:
        if missing := FIDELITY - one.keys():
            raise KeyError(f"fidelity without {', '.join(sorted(missing))}")
    parts = {"coefficients": coefficients, "host": host, "residuals": residuals, "fidelity": fidelity}
    return Profile(**{**data, "name": name, **parts})
