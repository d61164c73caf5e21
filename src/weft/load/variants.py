"""Variants: servers that are compared, each running already or started for the purpose."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.errors import EngineError, OptionError

PATIENCE = 600.0  # seconds for a server to come up
SAID = 20  # last lines of a server that are shown where it does not


class Variant(NamedTuple):
    name: str
    target: str  # a URL, or a command with {port} in it

    @property
    def is_running(self) -> bool:
        return self.target.startswith(("http://", "https://"))


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """From `NAME: URL` or `NAME: COMMAND with {port}`."""
    found = []
    for text in texts:
        name, _, target = (part.strip() for part in text.partition(":"))
        if not name or not target or not (Variant(name, target).is_running or "{port}" in target):
            raise OptionError(
                f"--variant {text!r} must be NAME: URL, or NAME: COMMAND with {{port}} where the port goes, as in "
                "'slo: weft serve --port {port} --policy slo'"
            )
        found.append(Variant(name, target))
        _check_command(found[-1])
    names = [variant.name for variant in found]
    if len({*names}) < len(names):
        raise OptionError(f"two variants have the same name: {', '.join(names)}")
    return found


def _check_command(variant: Variant) -> None:
    """Quotes that do not end are said now, not when its turn comes."""
    if variant.is_running:
        return
    try:
        shlex.split(variant.target)
    except ValueError as error:
        raise OptionError(f"--variant {variant.name}: {variant.target!r} is not a command: {error}") from None


@contextlib.contextmanager
def running(variant: Variant, key: str | None = None, patience: float = PATIENCE) -> Iterator[str]:
    """The URL of a variant that answers, asked with the API key. One that was started for it ends with it."""
    if variant.is_running:
        yield variant.target
        return
    port = _free_port()
    command = shlex.split(variant.target.replace("{port}", str(port)))
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    except OSError as error:
        raise EngineError(f"cannot start {variant.name}: {command[0]}: {error.strerror}") from None
    said: deque[str] = deque(maxlen=SAID)
    assert process.stdout is not None
    # Its pipe is kept empty, so that the server is never held up by it.
    listening = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
    listening.start()
    try:
        url = f"http://127.0.0.1:{port}"
        with _terminable():
            _wait_for(url, key, process, patience, variant, said)
            yield url
    finally:
        _end(process)
        listening.join(5)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a server and all that it has started, which are one group."""
    # What a shell runs in the background has Ctrl-C ignored, and so has what that starts.
    gently = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
    for how, patience in ((gently, 30), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """While a server of ours runs, being told to end is like Ctrl-C: the server must not be left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not on the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for(
    url: str, key: str | None, process: subprocess.Popen[str], patience: float, variant: Variant, said: deque[str]
) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if process.poll() is not None:
            time.sleep(0.2)  # its last words may still be on their way
            raise EngineError(f"{variant.name} ended while it started; its last words:\n{''.join(said)}")
        if _answers(url, key):
            return
        time.sleep(0.2)
    raise EngineError(f"{variant.name} does not answer at {url} after {patience:g} s; it said:\n{''.join(said)}")


def _answers(url: str, key: str | None) -> bool:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the client knows of no proxies either
    try:
        with direct.open(urllib.request.Request(url + "/v1/models", headers=headers), timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # it is up, and the client will say what is wrong with the key
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
