"""A headless Chromium, driven over the DevTools protocol."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_S = 60


class PageError(AssertionError):
    """A script that a test ran in the page raised."""


class Browser:
    """One browser with one tab. All methods block: the protocol runs in an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._loop = asyncio.new_event_loop()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.complaints: list[str] = []  # errors in the console, exceptions, violations of the content security policy
        self._process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--mute-audio"),
                *("--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1280,900", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._loop.run_until_complete(self._connect(folder))
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    async def _connect(self, folder: Path) -> None:
        file, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
        while not file.exists() or len(file.read_text().split()) < 2:
            assert self._process.poll() is None, "the browser ended"
            assert time.monotonic() < deadline, "the browser did not start"
            await asyncio.sleep(0.05)
        port = file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as response:
            tabs = await response.json()
        url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self._socket = await self._session.ws_connect(url, max_msg_size=0)
        self._reader = self._loop.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                future = self._answers.pop(found["id"])
                if not future.done():
                    future.set_result(found)
            else:
                self._note(found["method"], found["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str([one.get("description") or one.get("value") for one in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            if params["entry"].get("url", "").endswith("/favicon.ico"):
                return  # asked for where a test opens a file that is not HTML
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def send(self, method: str, **params: Any) -> Any:
        return self._loop.run_until_complete(self._send(method, params))

    async def _send(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._ids)
        self._answers[number] = future = self._loop.create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(future, START_S)
        assert "error" not in found, f"{method}: {found['error']}"
        return found["result"]

    def open(self, url: str) -> None:
        """Opens a page and waits for its scripts."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; that of its promise if it is one."""
        found = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 60) -> None:
        """Waits until an expression is true in the page."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"it did not come true in the page: {condition}"
            self.wait(0.05)

    def wait(self, seconds: float) -> None:
        """Lets time pass while events of the browser are read."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def set(self, selector: str, value: object) -> None:
        """Gives a field a value, as its user would."""
        self.run(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.value = "
            f"{json.dumps(str(value))}; field.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
        )

    def shape(self, width: int, height: int, *, phone: bool = False, dark: bool = False, scale: float = 1) -> None:
        """The size of the window, and which colours its user prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def close(self) -> None:
        if hasattr(self, "_socket"):
            self._loop.run_until_complete(self._disconnect())
        self._loop.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it started
        self._process.wait()

    async def _disconnect(self) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._session.close()
