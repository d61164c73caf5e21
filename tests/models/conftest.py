"""Models that several tests read, saved once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.models import tiny

torch.set_num_threads(1)

Saved = Callable[[str], tuple[PreTrainedModel, Path]]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A family or rope of tiny.py by name: the Transformers model and its directory, which is for reading only."""
    known: dict[str, tuple[PreTrainedModel, Path]] = {}

    def get(name: str) -> tuple[PreTrainedModel, Path]:
        if name not in known:
            model = {**tiny.ROPES, **tiny.FAMILIES}[name]()
            known[name] = model, tiny.save(model, tmp_path_factory.mktemp(name))
        return known[name]

    return get
