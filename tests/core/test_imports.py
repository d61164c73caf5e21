"""The core can be used without the rest of weft: it needs only numpy and the standard library."""

import subprocess
import sys

import weft

LISTS_PACKAGES = """
import sys
import {module}
packages = {{name.partition(".")[0] for name in sys.modules}}
print(*sorted(packages - set(sys.stdlib_module_names) - {{"__main__"}}))
print(*sorted(name for name in sys.modules if name.startswith("weft.") and name.count(".") == 1))
"""


def loaded(module: str) -> tuple[set[str], set[str]]:
    """The packages outside the standard library, and the parts of weft, that this import loads."""
    code = LISTS_PACKAGES.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    packages, parts = done.stdout.splitlines()
    return set(packages.split()), set(parts.split())


def test_importing_the_core_loads_only_numpy_and_the_standard_library() -> None:
    packages, parts = loaded("weft.core")
    own, _ = loaded("numpy")  # the interpreter and numpy may load helper packages of their own
    assert packages == own | {"weft"}
    assert parts == {"weft.core", "weft.errors"}


def test_importing_weft_loads_no_part_of_it() -> None:
    own, _ = loaded("sys")
    assert loaded("weft") == (own | {"weft"}, set())


def test_every_public_name_can_be_imported() -> None:
    assert set(weft.__all__) <= set(dir(weft))
    for name in weft.__all__:
        assert getattr(weft, name).__name__ == name
    assert not hasattr(weft, "no_such_name")
