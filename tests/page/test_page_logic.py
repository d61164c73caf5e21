"""The page's modules in a browser, on frames that a test makes."""

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.page.browser import Browser
from tests.page.synthetic import SyntheticServer, engine_frame, prompt_frame, step_frame
from weft.observe.frames import Frame, encode_frame, packed

HOSTILE = '<img src=x onerror="window.hacked = true"><script>window.hacked = true</script>'
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
    max_leaves=30,
)


def shown(value: Any) -> Any:
    """The value as the script below returns it: bytes as their numbers."""
    if isinstance(value, bytes):
        return {"bytes": list(value)}
    if isinstance(value, list):
        return [shown(one) for one in value]
    return {f"_{name}": shown(one) for name, one in value.items()} if isinstance(value, dict) else value


SHOWN = """const shown = (value) => value instanceof Uint8Array ? { bytes: [...value] }
    : Array.isArray(value) ? value.map(shown)
    : value !== null && typeof value === 'object'
    ? Object.fromEntries(Object.entries(value).map(([name, one]) => [`_${name}`, shown(one)])) : value;"""


def test_messagepack_is_decoded_as_msgspec_encodes_it(browser: Browser, synthetic: SyntheticServer) -> None:
    browser.open(f"{synthetic.url}/page/icon.svg")

    def check_one(values: list[Any]) -> None:
        data = base64.b64encode(msgspec.msgpack.encode(values)).decode()
        found = browser.run(
            f"""(async () => {{ {SHOWN} const {{ decode }} = await import('/page/msgpack.js');
            return shown(decode(Uint8Array.from(atob('{data}'), (one) => one.charCodeAt(0)))); }})()"""
        )
        assert found == json.loads(json.dumps(shown(values)))

    @settings(suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.lists(VALUES, min_size=1, max_size=20))
    def check(values: list[Any]) -> None:
        check_one(values)

    check_one([2**7, 2**8, 2**16, 2**32, -1, -32, -33, -129, -(2**15) - 1, -(2**31) - 1, 1.5, "é" * 300, "x" * 70_000])
    check_one([b"y" * 300, b"y" * 66_000, [0] * 300, [0] * 66_000, {f"{number}": number for number in range(300)}])
    check()


@pytest.mark.parametrize(
    "data", [b"", b"\x92\x01", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xcb\x00", b"\x01\x01", b"\x91" * 99 + b"\x01"]
)
def test_damaged_messagepack_is_an_error(browser: Browser, synthetic: SyntheticServer, data: bytes) -> None:
    browser.open(f"{synthetic.url}/page/icon.svg")
    found = browser.run(
        f"""import('/page/msgpack.js').then(({{ decode, MsgpackError }}) => {{
            try {{ decode(new Uint8Array({list(data)})); return 'decoded'; }}
            catch (error) {{ return error instanceof MsgpackError ? 'refused' : String(error); }} }})"""
    )
    assert found == "refused"


def analysed(browser: Browser, server: SyntheticServer, frames: list[Frame], wanted: str) -> Any:
    """What an expression on the model says after these frames."""
    browser.open(f"{server.url}/page/icon.svg")
    data = base64.b64encode(packed(encode_frame(frame) for frame in frames)).decode()
    return browser.run(
        f"""(async () => {{
            const {{ Model }} = await import('/page/model.js');
            const {{ unpack }} = await import('/page/feed.js');
            const model = new Model();
            model.add(unpack(Uint8Array.from(atob('{data}'), (one) => one.charCodeAt(0)).buffer), 0);
            return ({wanted}); }})()"""
    )


def decodes(first: int, begin: float, count: int, keys: tuple[int, ...], seconds: float = 0.01) -> list[Frame]:
    steps = [(first + index, begin + index * seconds) for index in range(count)]
    return [step_frame(number, at, at + seconds, keys) for number, at in steps]


PLAIN = ".map((one) => ({ ...one, keys: [...one.keys], why: model.why(one) }))"
START: list[Frame] = [engine_frame(), prompt_frame(1, 0.0), step_frame(1, 0.01, 0.02, (), [(1, 0, 32, True)])]
LATE: dict[str, list[Frame]] = {
    "prefill": [
        prompt_frame(7, 0.1, 4000),
        *decodes(2, 0.02, 8, (1,)),
        step_frame(10, 0.1, 0.3, (1,), [(7, 0, 2000, False)]),
    ],
    "preempted": [
        *decodes(2, 0.02, 8, (1,)),
        step_frame(10, 0.1, 0.15, (), (), preempted=[1]),
        step_frame(11, 0.15, 0.3, (), [(1, 0, 40, True)]),
    ],
    "host": [*decodes(2, 0.02, 8, (1,)), step_frame(10, 0.4, 0.41, (1,))],
    "decodes": [*decodes(2, 0.02, 8, (1,)), step_frame(10, 0.1, 0.3, (1,))],
    "not in the step": [
        *decodes(2, 0.02, 8, (1,)),
        step_frame(10, 0.1, 0.2, (2,)),
        step_frame(11, 0.2, 0.21, (1,)),
    ],
}


LATE["host after a step"] = [
    *decodes(2, 0.02, 8, (1,)),
    step_frame(10, 0.1, 0.11, (2,)),
    step_frame(11, 0.4, 0.41, (1,)),
]


@pytest.mark.parametrize("cause", LATE)
def test_a_late_token_has_its_cause(browser: Browser, synthetic: SyntheticServer, cause: str) -> None:
    found = analysed(
        browser, synthetic, [*START, *LATE[cause]], f"model.stalls.filter((one) => one.kind === 'gap'){PLAIN}"
    )
    late = [one for one in found if one["keys"] == [1]]
    assert [one["cause"] for one in late] == [cause.removesuffix(" after a step")]
    if cause == "prefill":
        assert late[0]["why"] == "the prompt of request 7 (4,000 tokens) was read in the same steps"
        assert late[0]["seconds"] == pytest.approx(0.2)


def test_late_tokens_with_one_cause_are_one_entry(browser: Browser, synthetic: SyntheticServer) -> None:
    two: list[Frame] = [prompt_frame(2, 0.0), step_frame(2, 0.02, 0.03, (1,), [(2, 0, 32, True)])]
    slow: list[Frame] = [
        prompt_frame(7, 0.1, 4000),
        *(step_frame(9 + at, 0.1 * (at + 1), 0.1 * (at + 2), (1, 2), [(7, 500 * at, 500, at == 7)]) for at in range(8)),
    ]
    found = analysed(browser, synthetic, [*START, *two, *decodes(3, 0.03, 7, (1, 2)), *slow], f"model.stalls{PLAIN}")
    assert [(one["cause"], one["blamed"], one["tokens"], one["keys"]) for one in found] == [("prefill", 7, 16, [1, 2])]


def test_tokens_in_time_are_not_late(browser: Browser, synthetic: SyntheticServer) -> None:
    frames = [*START, *decodes(2, 0.02, 50, (1,), 0.049)]
    assert analysed(browser, synthetic, frames, "[model.stalls.length, model.rows(0)[0].ticks.length]") == [0, 51]


def test_a_late_first_token_says_what_it_waited_for(browser: Browser, synthetic: SyntheticServer) -> None:
    waiting: list[Frame] = [
        step_frame(2 + n, 0.02 + n * 0.04, 0.06 + n * 0.04, (1,), waits_for="blocks") for n in range(40)
    ]
    frames = [*START, prompt_frame(2, 0.03), *waiting, step_frame(50, 1.7, 1.71, (1,), [(2, 0, 32, True)])]
    found = analysed(browser, synthetic, frames, f"model.stalls.filter((one) => one.kind === 'first token'){PLAIN}")
    assert [(one["keys"], one["cause"], one["why"]) for one in found] == [
        ([2], "queue", "it waited for room in the KV cache")
    ]


def test_a_request_that_waits_for_long_keeps_its_row(browser: Browser, synthetic: SyntheticServer) -> None:
    frames = [*START, prompt_frame(2, 0.03), *decodes(2, 0.04, 900, (1,), 0.03)]
    assert analysed(browser, synthetic, frames, "model.rows(20).map((one) => one.key)") == [1, 2]
    idle = step_frame(2000, 60.0, 60.01, (), [(3, 0, 1, False)])
    assert analysed(browser, synthetic, [*frames, idle], "model.rows(50).map((one) => one.key)") == [3]


def test_charts_have_the_figures_of_the_frames(browser: Browser, synthetic: SyntheticServer) -> None:
    frames = [*START, *decodes(2, 0.02, 150, (1,))]
    found = analysed(browser, synthetic, frames, "model.series(2.1).at(-1)")
    assert found["ttft"] == pytest.approx(0.02)
    assert found["p50"] == pytest.approx(0.01, rel=0.06)
    assert found["p99"] == pytest.approx(0.01, rel=0.06)
    assert found["throughput"] == 75
    assert found["kv"] == 0.5


def test_a_thousand_rows_are_drawn_as_cheaply_as_those_in_sight(browser: Browser, synthetic: SyntheticServer) -> None:
    keys = range(1000)
    synthetic.add([engine_frame(), *(prompt_frame(key, 0.001 * key) for key in keys)])
    synthetic.add([step_frame(1, 1.0, 1.1, (), [(key, 0, 32, True) for key in keys])])
    synthetic.add(decodes(2, 1.1, 200, tuple(keys), 0.03))
    browser.open(f"{synthetic.url}/")
    browser.until("document.querySelector('#timeline-text').textContent.startsWith('1,000 requests')")
    browser.run(
        """window.texts = 0; const plain = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
            if (text.startsWith('#')) texts += 1; return plain.call(this, text, ...rest); };
        document.querySelector('#rows').scrollTop = 8000; 0"""
    )
    drawn = """new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(() => {
        window.texts = 0; requestAnimationFrame(() => requestAnimationFrame(() => resolve(texts))); })))"""
    assert 10 < browser.run(drawn) <= 3 * 20, "labels of the rows in sight, in at most three pictures"
    assert browser.run("document.querySelector('#rows').scrollHeight") > 1000 * 16


def test_hostile_text_is_text(browser: Browser) -> None:
    synthetic = SyntheticServer(model=HOSTILE)
    try:
        synthetic.answers = [HOSTILE, "\u202e</textarea>", "&lt;b&gt;"]
        synthetic.add([engine_frame(model=HOSTILE), *START[1:]])
        browser.open(f"{synthetic.url}/")
        browser.set("#prompt", HOSTILE)
        browser.until("document.querySelector('#server-line').textContent.includes('onerror')")
        browser.click("#send")
        browser.until("document.querySelector('.message.assistant .text').textContent.includes('&lt;b&gt;')")
        browser.until("!document.querySelector('#retry').disabled")
        assert browser.text(".message.user") == HOSTILE
        assert browser.text(".message.assistant .text").startswith(HOSTILE)
        assert browser.run(
            "[window.hacked === undefined, document.querySelectorAll('main img, main script').length]"
        ) == [
            True,
            0,
        ]
    finally:
        synthetic.close()


def test_it_says_that_the_connection_is_lost_and_comes_back(browser: Browser) -> None:
    synthetic = SyntheticServer()
    synthetic.add([*START, *decodes(2, 0.02, 20, (1,))])
    browser.open(f"{synthetic.url}/")
    browser.until("document.querySelector('#timeline-text').textContent.startsWith('1 request')")
    synthetic.close()
    browser.until("document.querySelector('#connection').textContent.includes('lost')")
    assert not browser.run("document.querySelector('#connection').hidden")
    again = SyntheticServer(synthetic.port, model="another")
    try:
        again.add([engine_frame(50.0), *(prompt_frame(key, 50.0) for key in (1, 2, 3))])
        again.add([step_frame(1, 50.0, 50.1, (), [(key, 0, 32, True) for key in (1, 2, 3)])])
        again.add(decodes(2, 50.1, 40, (1,)))
        assert len(again.frames) > len(synthetic.frames), "its numbers do not show that it is another server"
        browser.until("document.querySelector('#connection').hidden")
        browser.until("document.querySelector('#timeline-text').textContent.startsWith('3 requests')")
        browser.until("document.querySelector('#server-line').textContent.includes('another')")
        assert browser.complaints, "the console names the requests without an answer"
        assert all("ERR_" in one for one in browser.complaints)
        browser.complaints.clear()
    finally:
        again.close()
