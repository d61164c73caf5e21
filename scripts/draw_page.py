"""Screenshots of the page at `/` of a server, with real streams and a long prompt among them.

    python scripts/draw_page.py [--folder docs]

Starts a server with the small model that ships with weft, and Chromium (Debian's package `chromium`). Writes
page-desktop.png (dark, the timeline beside a chat), page-what-if.png (dark) and page-phone.png (light).
Needs weft[test].
"""

import argparse
import base64
import io
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.page.browser import Browser
from tests.serve.running import RunningServer

STREAMS = 9
STREAM_TOKENS = 420
LONG_PROMPT = 1600  # tokens
COLOURS = 96  # of a picture: it has few, and is much smaller with a palette


def shoot(browser: Browser, file: Path) -> None:
    data = base64.b64decode(browser.send("Page.captureScreenshot", format="png")["data"])
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def complete(server: RunningServer, prompt_tokens: int, max_tokens: int) -> None:
    prompt = [random.randint(20, 300) for _ in range(prompt_tokens)]
    server.post("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})


def start_streams(server: RunningServer) -> list[threading.Thread]:
    streams = []
    for _ in range(STREAMS):
        tokens = random.randint(20, 200)
        streams.append(threading.Thread(target=complete, args=(server, tokens, STREAM_TOKENS), daemon=True))
        streams[-1].start()
        time.sleep(0.25)
    return streams


def send_long_prompt(server: RunningServer) -> None:
    threading.Thread(target=complete, args=(server, LONG_PROMPT, 40), daemon=True).start()


def chat(browser: Browser, text: str) -> None:
    browser.set("#prompt", text)
    browser.click("#send")


def main() -> None:
    parser = argparse.ArgumentParser(description="Screenshots of the page at / of a server.")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    folder: Path = parser.parse_args().folder
    random.seed(1)
    server = RunningServer("--max-num-seqs", "64", "--kv-cache-memory-bytes", "256MiB")
    browser = Browser(Path(tempfile.mkdtemp()))
    try:
        browser.shape(1400, 1000, dark=True)
        browser.open(f"{server.url}/")
        browser.until("document.querySelector('#server-line').textContent.includes('policy')")
        for stream in start_streams(server):
            stream.join()
        browser.wait(3)
        for size, dark, name in (((1400, 1000), True, "page-desktop.png"), ((390, 1250), False, "page-phone.png")):
            browser.shape(*size, phone=not dark, dark=dark)
            browser.run("scrollTo(0, 0)")
            browser.click("#clear")
            streams = start_streams(server)
            chat(browser, "A latte, please.")
            browser.wait(1.5)
            send_long_prompt(server)
            browser.wait(2.0)
            chat(browser, "With oat milk. How much is it?")
            browser.wait(3.0)
            shoot(browser, folder / name)
            for stream in streams:
                stream.join()
        browser.shape(1400, 1150, dark=True)
        browser.run("document.querySelector('#what-if').scrollIntoView()")
        browser.until("document.querySelector('#w-profile').options.length")
        browser.set("#w-profile", "h200-llama-3-8b")
        browser.until("document.querySelector('#w-status').textContent.includes('h200')")
        for _ in range(15):
            browser.click("#a-next")
        browser.wait(0.5)
        shoot(browser, folder / "page-what-if.png")
        for complaint in browser.complaints:
            print(complaint, file=sys.stderr)
    finally:
        browser.close()
        server.kill()


if __name__ == "__main__":
    main()
