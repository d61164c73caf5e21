"""The verdict about a CPU, with faked CPUs and children; and once for real, on whatever this machine is."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.engine import cpu_features

HONEST = "fpu avx2 avx512bw avx512_vnni avx512_bf16"
AMX = f"{HONEST} amx_bf16 avx512_fp16 amx_tile amx_int8"


class FakeMachine:
    """A CPU with flags, and the fate of the children that try its products: {level: exit code or exception}."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.fates: dict[str | None, int | Exception] = {}
        self.tried: list[str | None] = []
        self.cache = tmp_path / "cache"
        self._cpuinfo = tmp_path / "cpuinfo"
        self.set_flags(AMX)
        for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
            monkeypatch.setenv(name, "")  # so that monkeypatch restores what prepare_cpu sets
            monkeypatch.delenv(name)
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.cache))
        monkeypatch.setattr(cpu_features, "_CPUINFO", self._cpuinfo)
        monkeypatch.setattr(cpu_features.subprocess, "run", self._run)
        monkeypatch.delitem(sys.modules, "torch", raising=False)

    def set_flags(self, flags: str, model: str = "Fake(R) CPU", mhz: int = 2000) -> None:
        one = f"processor\t: 0\nmodel name\t: {model}\ncpu MHz\t\t: {mhz}\nflags\t\t: {flags}\n"
        self._cpuinfo.write_text(f"{one}\n{one}\n")

    def _run(self, command, *, env, timeout, **_):
        assert command[0] == sys.executable
        assert timeout > 0
        level = env.get("ONEDNN_MAX_CPU_ISA")
        self.tried.append(level)
        fate = self.fates.get(level, 0)
        if isinstance(fate, Exception):
            raise fate
        return subprocess.CompletedProcess(command, fate)

    def next_process(self) -> str | None:
        """prepare_cpu as a new process sees it: nothing tried yet, nothing restricted."""
        os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
        self.tried.clear()
        return cpu_features.prepare_cpu()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return FakeMachine(tmp_path, monkeypatch)


def test_a_cpu_without_amx_is_not_tried(machine):
    machine.set_flags(HONEST)
    assert machine.next_process() is None
    assert machine.tried == []
    assert not machine.cache.exists()


def test_a_machine_without_cpuinfo_is_left_alone(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_features, "_CPUINFO", tmp_path / "missing")
    assert machine.next_process() is None
    assert machine.tried == []


def test_the_users_own_choice_stands(machine, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu_features.prepare_cpu() == "AVX2"
    assert machine.tried == []


def test_amx_that_works_is_used_and_tried_once(machine):
    assert machine.next_process() is None
    assert machine.tried == [None]
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert machine.next_process() is None
    assert machine.tried == []


def test_amx_that_kills_is_avoided_and_the_way_round_is_tried_too(machine):
    machine.fates = {None: -signal.SIGILL}
    assert machine.next_process() == "AVX512_CORE_FP16"
    assert machine.tried == [None, "AVX512_CORE_FP16"]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert cpu_features.prepare_cpu() == "AVX512_CORE_FP16"  # again in the same process
    assert machine.next_process() == "AVX512_CORE_FP16"
    assert machine.tried == []


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("avx2 avx512bw avx512_vnni avx512_bf16", "AVX512_CORE_BF16"),
        ("avx2 avx512bw avx512_vnni", "AVX512_CORE_VNNI"),
        ("avx2 avx512bw", "AVX512_CORE"),
        ("avx2", "AVX2"),
        ("", "AVX2"),
    ],
)
def test_the_level_is_the_best_that_the_cpu_has(machine, flags, level):
    machine.fates = {None: -signal.SIGILL}
    machine.set_flags(f"{flags} amx_tile")
    assert machine.next_process() == level


def test_a_level_that_kills_as_well_is_passed_over(machine):
    machine.fates = {None: -signal.SIGILL, "AVX512_CORE_FP16": -signal.SIGILL, "AVX512_CORE_BF16": -signal.SIGSEGV}
    assert machine.next_process() == "AVX512_CORE_VNNI"


def test_where_nothing_helps_the_lowest_level_is_used_and_nothing_is_remembered(machine):
    machine.fates = dict.fromkeys([None, *cpu_features._LEVELS], -signal.SIGILL)
    assert machine.next_process() == "AVX2"
    assert not machine.cache.exists()


@pytest.mark.parametrize(
    "fate",
    [subprocess.TimeoutExpired("python", 1), OSError("no more processes"), -signal.SIGKILL, 1],
    ids=["timeout", "cannot start", "killed from outside", "exception"],
)
def test_a_child_that_tells_nothing_is_no_verdict(machine, fate):
    machine.fates = {None: fate}
    assert machine.next_process() == "AVX512_CORE_FP16"  # careful now
    assert machine.tried == [None]
    machine.fates = {}
    assert machine.next_process() is None  # tried again, and well
    assert machine.tried == [None]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"isa": 3}', '{"isa": "ALL"}', '{"isa": []}', "\x00"])
def test_a_corrupt_cache_is_written_anew(machine, content):
    machine.next_process()
    (file,) = (machine.cache / "weft").iterdir()
    file.write_text(content)
    machine.fates = {None: -signal.SIGILL}
    assert machine.next_process() == "AVX512_CORE_FP16"
    assert json.loads(file.read_text())["isa"] == "AVX512_CORE_FP16"
    assert [file] == list((machine.cache / "weft").iterdir())  # no drafts left behind


def test_another_cpu_kernel_host_or_torch_is_tried_anew(machine, monkeypatch):
    machine.next_process()
    machine.set_flags(AMX, mhz=1999)
    machine.next_process()
    assert machine.tried == []  # the clock rate is not the CPU
    for change in (
        lambda: machine.set_flags(AMX, model="Other"),
        lambda: monkeypatch.setattr(cpu_features.platform, "release", lambda: "99.0"),
        lambda: monkeypatch.setattr(cpu_features.platform, "node", lambda: "elsewhere"),
        lambda: monkeypatch.setattr(cpu_features.importlib.metadata, "version", lambda name: "99.0"),
    ):
        change()
        machine.next_process()
        assert machine.tried == [None]


def test_a_cache_that_cannot_be_written_is_no_error(machine, caplog):
    machine.cache.write_text("a file where the directory should be")
    machine.fates = {None: -signal.SIGILL}
    with caplog.at_level(logging.INFO):
        assert machine.next_process() == "AVX512_CORE_FP16"
    assert "cannot be written" in caplog.text
    assert machine.next_process() == "AVX512_CORE_FP16"
    assert machine.tried == [None, "AVX512_CORE_FP16"]


@pytest.mark.parametrize(("survives", "enabled"), [(True, True), (False, False), (None, False)])
def test_where_torch_has_computed_already_onednn_is_switched_off(machine, monkeypatch, caplog, survives, enabled):
    mkldnn = SimpleNamespace(enabled=True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(backends=SimpleNamespace(mkldnn=mkldnn)))
    monkeypatch.setattr(cpu_features, "_fork_survives", lambda: survives)
    machine.fates = {None: -signal.SIGILL}
    assert machine.next_process() == "AVX512_CORE_FP16"
    assert mkldnn.enabled is enabled
    assert ("oneDNN is off" in caplog.text) is not enabled


def python(code: str, cache: Path) -> None:
    """Run code in a fresh process with an environment that has made no choice."""
    unset = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


PRODUCTS = """
x = torch.ones(64, 256, dtype=torch.bfloat16)
assert (x @ x.T)[0, 0] == 256
torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
print("alive")
"""


def test_this_machine_survives_a_product(cache):
    prepare = (
        "import sys; from weft.engine.cpu_features import prepare_cpu; prepare_cpu(); assert 'torch' not in sys.modules"
    )
    python(f"{prepare}\nimport torch{PRODUCTS}", cache)


@pytest.mark.parametrize("before", ["", "torch.ones(512, 512) @ torch.ones(512, 512)"], ids=["imported", "computed"])
def test_this_machine_survives_though_torch_came_first(cache, before):
    python(f"import torch\n{before}\nfrom weft.engine.cpu_features import prepare_cpu; prepare_cpu(){PRODUCTS}", cache)
