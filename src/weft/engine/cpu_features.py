"""Works around CPUs that advertise AMX but cannot run it. Owns ONEDNN_MAX_CPU_ISA and the cached test result.

Some virtual machines are like that. oneDNN, which computes torch's 16-bit matrix products, trusts the flag, and the
process dies with SIGILL in its first bfloat16 product. Only a test can tell, so a child process runs one, once for each
machine and torch version. This file imports only the standard library: it is used before torch is imported, and the
child runs it as a script.
"""

import faulthandler
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


def prepare_cpu() -> str | None:
    """Restricts oneDNN if the CPU's AMX does not work. Returns the instruction set that it is restricted to, or None.

    Call it before torch computes anything in this process. Child processes inherit the restriction. oneDNN reads the
    variable at its first product of any type. If the process has computed before, oneDNN is switched off instead: this
    is several times slower for 16-bit prompts, but does not crash.
    """
    chosen = os.environ.get(_VARIABLE) or os.environ.get("DNNL_MAX_CPU_ISA")
    cpu = _read_cpu()
    if chosen is not None or "amx_tile" not in cpu["flags"].split():
        return chosen
    level = _verdict(cpu)
    if level is None:
        return None
    os.environ[_VARIABLE] = level
    if "torch" in sys.modules and not _fork_survives():
        sys.modules["torch"].backends.mkldnn.enabled = False
        logger.warning("torch computed before weft was asked, and this CPU's AMX does not work: oneDNN is off (slow)")
        logger.warning("for full speed, create weft's LLM first, or set %s=%s in the environment", _VARIABLE, level)
    return level


_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_CPUINFO = Path("/proc/cpuinfo")  # only on Linux; elsewhere nothing is done
_TIMEOUT = 120.0  # seconds; the child imports torch, possibly from a cold disk
# oneDNN's levels below AMX, best first, each with the CPU flag that makes it useful.
_LEVELS = {
    "AVX512_CORE_FP16": "avx512_fp16",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE": "avx512bw",
    "AVX2": "avx2",
}


def _read_cpu() -> dict[str, str]:
    """Fields that identify the first CPU, without speeds and ids, which differ between calls or cores."""
    cpu = dict.fromkeys(("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags"), "")
    with suppress(OSError):
        for line in _CPUINFO.read_text(errors="replace").split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() in cpu:
                cpu[name.strip()] = value.strip()
    return cpu


def _verdict(cpu: dict[str, str]) -> str | None:
    """The best level that works, from the cache or by a test. None: no restriction."""
    file = _cache_file(cpu)
    with suppress(OSError, ValueError, TypeError, KeyError):
        cached: str | None = json.loads(file.read_text())["isa"]
        if cached is None or cached in _LEVELS:
            return cached
    logger.info("trying out this CPU's matrix instructions in a child process (once)")
    flags = cpu["flags"].split()
    levels = [level for level, flag in _LEVELS.items() if flag in flags] or list(_LEVELS)[-1:]
    for level in [None, *levels]:
        survived = _child_survives(level)
        if survived is None:  # unknown: be careful in this process, test again in the next one
            return levels[0]
        if survived:
            _remember(file, {"isa": level, "cpu": cpu["model name"], "host": platform.node()})
            return level
    return levels[-1]


def _cache_file(cpu: dict[str, str]) -> Path:
    """One file per CPU, host, kernel and torch version, so that machines can share a home directory."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    key = json.dumps([cpu, torch, platform.node(), platform.release()])
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "weft" / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _remember(file: Path, verdict: dict[str, str | None]) -> None:
    """Saves the result. Several processes may write the same at once: the last wins, and no reader sees half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.stem, delete=False) as draft:
            json.dump(verdict, draft)
        os.replace(draft.name, file)
    except OSError as error:
        logger.info("the CPU is tried out again next time, as %s cannot be written: %s", file, error)


def _child_survives(level: str | None) -> bool | None:
    """Whether products run in a new process restricted to `level`; None if unknown."""
    environment = {**os.environ, **({} if level is None else {_VARIABLE: level})}
    try:
        # -P: files of this folder must not shadow the standard library.
        child = subprocess.run(
            [sys.executable or "python3", "-P", __file__],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _survived(child.returncode)


def _fork_survives(seconds: float = 10.0) -> bool | None:
    """Whether products run in a fork of this process; None if unknown. If not, oneDNN was initialised before the
    variable was set, which it does not report."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it may hang on other threads' locks: see `seconds`
            pid = os.fork()
    except OSError:
        return None
    if pid == 0:
        try:
            faulthandler.disable()
            _try_products(threads=1)  # the thread pool does not survive a fork
        finally:
            os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return _survived(os.waitstatus_to_exitcode(status))
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _survived(code: int) -> bool | None:
    crashes = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT}
    return True if code == 0 else False if -code in crashes else None


def _try_products(threads: int | None = None) -> None:
    """Runs the kinds of products that weft uses. The sizes matter: oneDNN leaves small products to other code."""
    import resource

    import torch
    from torch.nn import functional as F

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an expected result here: no core file
    if threads is not None:
        torch.set_num_threads(threads)
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.ones(128, 128, dtype=dtype)
        for rows in (1, 2, 64, 600):
            x = torch.ones(rows, 128, dtype=dtype)
            heads = torch.ones(1, 2, rows, 64, dtype=dtype)
            F.linear(x, weight)
            F.linear(x, weight, weight[0])
            torch.matmul(x, weight)
            torch.bmm(heads[0], heads[0].transpose(1, 2))
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            F.scaled_dot_product_attention(heads, heads, heads, attn_mask=torch.ones(rows, rows, dtype=torch.bool))


if __name__ == "__main__":
    _try_products()
