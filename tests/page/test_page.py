"""The page in a browser, on a real server with the default model."""

import os
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.page.browser import Browser
from tests.page.conftest import KEYS
from tests.serve.running import RunningServer, eventually, is_alive

ALPHA, BETA = KEYS
LONG = 3000  # prompt tokens: two dozen slices
TOKENS = 150  # of each stream
MODEL = "import('/page/model.js')"


# Pixels of the timeline's rows that have the colour of a slice.
AMBER = """(() => {
    const canvas = document.querySelector('#rows-canvas');
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let found = 0;
    for (let at = 0; at < data.length; at += 4) {
        if (data[at] === 233 && data[at + 1] === 150 && data[at + 2] === 42) found += 1;
    }
    return found;
})()"""


def open_page(browser: Browser, server: RunningServer, key: str = ALPHA) -> None:
    """The page of a user that gave a key before."""
    browser.open(f"{server.url}/page/icon.svg")  # of the same origin, and without scripts
    browser.run(f"sessionStorage.setItem('weft-key', '{key}')")
    browser.open(f"{server.url}/")
    browser.until("document.querySelector('#server-line').textContent.includes('policy chunked')")


def complete(server: RunningServer, key: str, prompt: list[int], max_tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text


def test_it_asks_for_a_key(browser: Browser, keyed_server: RunningServer) -> None:
    browser.open(f"{keyed_server.url}/page/icon.svg")
    browser.run("sessionStorage.clear()")
    browser.open(f"{keyed_server.url}/")
    browser.until("document.querySelector('#key-dialog').open")
    for key, done in (("wrong", "#key-error:not(:empty)"), (ALPHA, "#key-dialog:not([open])")):
        browser.set("#key", key)
        browser.run("document.querySelector('#key-form').requestSubmit()")
        browser.until(f"document.querySelector('{done}')")
        if key == "wrong":
            assert "not one that this server knows" in browser.text("#key-error")
    browser.until("document.querySelector('#server-line').textContent.includes('policy chunked')")
    assert browser.complaints, "the console names the answers with 401"
    assert all("401" in one for one in browser.complaints)
    browser.complaints.clear()


def test_a_chat_streams(browser: Browser, keyed_server: RunningServer) -> None:
    open_page(browser, keyed_server)
    browser.set("#max-tokens", 30)
    browser.set("#prompt", "A latte, please.")
    browser.run(
        "window.lengths = new Set(); window.watch = new MutationObserver(() => lengths.add("
        "document.querySelector('.message .text').textContent.length)); "
        "watch.observe(document.querySelector('#messages'), { subtree: true, childList: true })"
    )
    browser.click("#send")
    browser.until("document.querySelector('.phases span')")
    assert browser.run("[...lengths].filter(Boolean).length") > 3, "the text grew with the stream"
    figures = browser.text(".figures")
    for word in ("first token after", "tokens/s", "prompt ", "queue ", "prefill ", "decode "):
        assert word in figures
    shares = browser.run("[...document.querySelectorAll('.phases span')].map((one) => Number(one.style.flexGrow))")
    assert len(shares) == 3
    assert all(share >= 0 for share in shares)
    assert shares[2] > 0
    before = browser.text(".message.assistant .text")
    browser.until("!document.querySelector('#retry').disabled")
    browser.set("#max-tokens", 500)
    browser.run("document.querySelector('#system').value = 'Count to one thousand.'")
    browser.click("#retry")
    browser.until("document.querySelector('.message.assistant .text').textContent")
    browser.click("#stop")
    browser.until("!document.querySelector('#retry').disabled")
    assert browser.run("document.querySelectorAll('.message.assistant').length") == 1
    assert before


def test_the_timeline_shows_an_injected_long_prompt(browser: Browser, keyed_server: RunningServer) -> None:
    open_page(browser, keyed_server)
    browser.until("!document.querySelector('#connection').textContent")
    streams = [
        threading.Thread(target=complete, args=(keyed_server, ALPHA, [20 + number] * 20, TOKENS)) for number in range(3)
    ]
    for stream in streams:
        stream.start()
    complete(keyed_server, BETA, [30 + number % 150 for number in range(LONG)], 2)
    browser.until(f"{AMBER} > 200")  # the slices of the short prompts are about 20 pixels each
    browser.until("/ [4-9] requests in /.test(' ' + document.querySelector('#timeline-text').textContent)")
    for stream in streams:
        stream.join()
    found = browser.run(
        f"""(async () => {{
            const {{ Model }} = await {MODEL};
            const {{ unpack }} = await import('/page/feed.js');
            const {{ ask }} = await import('/page/api.js');
            const model = new Model();
            model.add(unpack(await (await ask('observe/frames?seconds=100')).arrayBuffer()), 0);
            return model.rows(-Infinity).map((one) => ({{
                tokens: one.promptTokens, slices: one.slices.length, ticks: one.ticks.length, id: one.id }}));
        }})()"""
    )
    long = next(one for one in found if one["tokens"] == LONG)
    assert long["slices"] >= LONG // 128, "its slices are told one by one"
    assert long["id"] == "", "it belongs to another key"
    assert sorted(one["ticks"] for one in found)[-1] > TOKENS // 2, "each token is told"
    assert any(one["id"] for one in found), "its own requests have ids"


def test_a_slider_changes_the_prediction_and_the_animation_steps(browser: Browser, keyed_server: RunningServer) -> None:
    open_page(browser, keyed_server)
    browser.run("document.querySelector('#what-if').scrollIntoView()")
    browser.until("document.querySelectorAll('#w-table tbody tr').length === 3")
    assert browser.run("[...document.querySelectorAll('#w-table tbody th')].map((one) => one.textContent)") == [
        "slo",
        "chunked",
        "monolithic",
    ]
    before = browser.text("#w-table tbody")
    browser.set("#w-prompt", 40)
    browser.until(f"document.querySelector('#w-table tbody').textContent !== {before!r}")
    caption = browser.text("#a-caption")
    assert caption.startswith("Step 1 of ")
    pixels = "document.querySelector('#a-canvas').toDataURL()"
    drawn = browser.run(pixels)
    browser.click("#a-next")
    assert browser.text("#a-caption").startswith("Step 2 of ")
    assert browser.run(pixels) != drawn
    browser.click("#a-play")
    browser.until("!document.querySelector('#a-caption').textContent.startsWith('Step 2 ')")
    browser.click("#a-play")
    for _ in range(10):
        browser.click("#a-next")
    assert "tokens of the long prompt" in " ".join(
        browser.run(
            "(async () => { const found = []; for (let at = 0; at < 12; at++) { document.querySelector("
            "'#a-back').click(); found.push(document.querySelector('#a-caption').textContent); } return found; })()"
        )
    )


def test_the_diagnosis_is_shown_in_words(browser: Browser, keyed_server: RunningServer) -> None:
    open_page(browser, keyed_server)
    complete(keyed_server, BETA, [25] * 20, 5)
    browser.click("#diagnose")
    browser.until("/Healthy|findings/.test(document.querySelector('#d-status').textContent)")
    found = keyed_server.post("/page/diagnosis", None, headers={"authorization": f"Bearer {ALPHA}"}).json()
    assert found["facts"], "requests were seen"
    assert len(found["findings"]) == browser.run("document.querySelectorAll('.finding').length")
    for finding in found["findings"]:
        assert finding["setting"] in browser.text("#d-findings")


@pytest.mark.skipif(find_spec("axe_core_python") is None, reason="needs axe-core-python")
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False)])
def test_axe_finds_nothing(browser: Browser, keyed_server: RunningServer, width: int, dark: bool) -> None:
    spec = find_spec("axe_core_python")
    assert spec is not None
    assert spec.origin is not None
    browser.shape(width, 844, phone=width < 500, dark=dark)
    open_page(browser, keyed_server)
    assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    browser.run("document.querySelector('#what-if').scrollIntoView()")
    browser.until("document.querySelector('#w-table tbody tr')")
    browser.run("document.querySelector('#settings').open = true")
    assert browser.run("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
    browser.run((Path(spec.origin).parent / "axe.min.js").read_text() + "; 0")
    rules = "{ resultTypes: ['violations'] }"
    found = browser.run(
        f"axe.run(document, {rules}).then((all) => all.violations.map((one) => "
        "`${one.id}: ${one.nodes.map((node) => node.target).join(', ')}`))"
    )
    assert found == []


def test_the_simulation_is_a_process_of_its_own_and_ends_with_the_server(keyed_server: RunningServer) -> None:
    headers = {"authorization": f"Bearer {ALPHA}"}
    assert keyed_server.post("/page/profiles", None, headers=headers).json()["profiles"]
    children = [
        int(line)
        for line in Path(f"/proc/{keyed_server.process.pid}/task/{keyed_server.process.pid}/children")
        .read_text()
        .split()
    ]
    mine = [pid for pid in children if b"weft.sim.what_if" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(mine) == 1
    os.kill(mine[0], 9)  # the next question starts another one
    eventually(lambda: not is_alive(mine[0]), 20)
    bad = keyed_server.post("/page/what_if", {"prompt_tokens": 0}, headers=headers)
    assert (bad.status_code, "prompt_tokens" in bad.text) == (400, True), bad.text
    assert keyed_server.post("/page/what_if", {}).status_code == 401
    assert keyed_server.post("/page/diagnosis", None).status_code == 401
    foreign = {**headers, "origin": "https://evil.example.org"}
    for path in ("/page/profiles", "/page/what_if", "/page/diagnosis"):
        assert keyed_server.post(path, None, headers=foreign).status_code == 403
    assert keyed_server.post("/page/what_if", {"x": "y" * 5000}, headers=headers).status_code == 413
