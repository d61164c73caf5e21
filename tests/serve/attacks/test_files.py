"""Files of a model that nobody of good will would publish: the server ends with one line."""

import json
import shutil
from pathlib import Path

import pytest

from tests.serve.attacks.test_supervision import started
from tests.serve.attacks.test_templates import MODEL

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def complaint(model: Path) -> str:
    done = started(str(model))
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_files_that_are_nested_deep(model: Path, name: str) -> None:
    raw = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps({**raw, "x": "?"}).replace('"?"', DEEP))
    assert f"{name} is nested more than 500 levels deep" in complaint(model)


def test_a_tokenizer_that_is_nested_deep(model: Path) -> None:
    (model / "tokenizer.json").write_text(DEEP)
    assert "tokenizer.json is not a usable tokenizer" in complaint(model)


def test_a_billion_layers(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 10**9}))
    assert "'num_hidden_layers' is 1000000000; it must be at most 10000" in complaint(model)


def test_a_header_of_weights_that_is_nested_deep(model: Path) -> None:
    (model / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    assert "its header is nested too deep" in complaint(model)
