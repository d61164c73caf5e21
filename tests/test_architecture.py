"""Imports point one way, and the pure parts stay pure."""

import ast
import subprocess
import sys
from pathlib import Path

import weft

ROOT = Path(weft.__file__).parent

# What each part may import of weft, beside itself. `errors` and `files` are open to all.
ALLOWED = {
    "core": set(),
    "text": set(),
    "sim": {"core", "engine", "observe"},
    "kv": set(),
    "kernels": {"kv"},
    "models": {"kernels"},
    "engine": {"core", "models", "kernels", "kv", "progress"},
    "progress": set(),
    "hub": set(),
    "llm": {"engine", "hub", "text", "models", "progress"},
    "observe": {"core"},
    "serve": {"core", "llm", "engine", "observe", "text"},
    "bench": {"core", "engine", "models", "sim", "text"},
    "diagnose": {"core", "engine", "observe", "sim"},
    "cli": {"core", "llm", "serve", "engine", "sim", "bench", "observe", "diagnose", "progress"},
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def modules(part: str) -> list[Path]:
    return [ROOT / f"{part}.py"] if (ROOT / f"{part}.py").exists() else sorted((ROOT / part).rglob("*.py"))


def test_imports_point_one_way() -> None:
    for part, allowed in ALLOWED.items():
        for path in modules(part):
            inside = {name.split(".")[1] for name in imports(path) if name.startswith("weft.")}
            assert inside <= allowed | {part, "errors", "files"}, f"{path.relative_to(ROOT)} imports {inside}"


def test_measuring_over_http_needs_no_engine() -> None:
    for path in modules("bench/http"):
        inside = {name for name in imports(path) if name.startswith("weft.")}
        allowed = ("weft.bench.http.", "weft.sim.", "weft.text.", "weft.errors", "weft.files")
        assert all(name.startswith(allowed) for name in inside), f"{path.name} imports {inside}"


def test_every_folder_is_in_the_table() -> None:
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert folders <= set(ALLOWED)


def test_core_is_pure() -> None:
    allowed = {"numpy", "weft", "enum", "dataclasses", "collections", "typing", "bisect", "heapq", "math", "struct"}
    allowed |= {"functools", "itertools"}
    for path in modules("core"):
        outside = {name.split(".")[0] for name in imports(path)} - allowed
        assert not outside, f"{path.name} imports {outside}"


def test_importing_weft_and_its_command_line_needs_no_torch() -> None:
    code = "import sys, weft, weft.cli, weft.engine.loop; sys.exit(not {'torch', 'llguidance'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
