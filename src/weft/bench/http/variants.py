"""Variants: servers that are compared. Each is already running, or is started from a command."""

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

START_TIMEOUT_S = 600.0  # for a server to start
SHOWN_LINES = 20  # last output lines that are shown if a server does not start


class Variant(NamedTuple):
    name: str
    target: str  # a URL, or a command with {port} in it

    @property
    def is_running(self) -> bool:
        return self.target.startswith(("http://", "https://"))


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """Parses `NAME: URL` or `NAME: COMMAND with {port}`."""
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
    """Reports unbalanced quotes now, not when the variant is started."""
    if variant.is_running:
        return
    try:
        shlex.split(variant.target)
    except ValueError as error:
        raise OptionError(f"--variant {variant.name}: {variant.target!r} is not a command: {error}") from None


@contextlib.contextmanager
def running(variant: Variant, key: str | None = None, timeout: float = START_TIMEOUT_S) -> Iterator[str]:
    """Yields the URL of a variant once it answers (with the API key). A server that was started here is ended after."""
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
    said: deque[str] = deque(maxlen=SHOWN_LINES)
    assert process.stdout is not None
    # Reads the server's output all the time, so that a full pipe never blocks the server.
    listening = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
    listening.start()
    try:
        url = f"http://127.0.0.1:{port}"
        with _terminable():
            _wait_for(url, key, process, timeout, variant, said)
            yield url
    finally:
        _end(process)
        listening.join(5)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a server and all its child processes, which form one process group."""
    # Background jobs of a shell ignore SIGINT, and so do their child processes. Then SIGTERM is sent.
    gently = signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT
    for how, timeout in ((gently, 30), (signal.SIGKILL, 10)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Treats SIGTERM like Ctrl-C while a server that we started runs, so that the server is not left behind."""

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
    url: str, key: str | None, process: subprocess.Popen[str], timeout: float, variant: Variant, said: deque[str]
) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            time.sleep(0.2)  # its last output may still be in the pipe
            raise EngineError(f"{variant.name} ended while it started; its last words:\n{''.join(said)}")
        if _answers(url, key):
            return
        time.sleep(0.2)
    raise EngineError(f"{variant.name} does not answer at {url} after {timeout:g} s; it said:\n{''.join(said)}")


def _answers(url: str, key: str | None) -> bool:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxies, as in the client
    try:
        with direct.open(urllib.request.Request(url + "/v1/models", headers=headers), timeout=5) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # the server is up; the client will report the wrong key
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
