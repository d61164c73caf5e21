"""Bodies that are small or unfinished, and would cost much all the same."""

import pytest

from tests.serve.running import RunningServer
from tests.serve.test_bad_input import CHAT, TEXT, check
from weft.files import MOST_DEPTH

RESPONSES = "/v1/responses"
SAID = b'"messages": [{"role": "user", "content": "x"}]'


def nested(levels: int) -> bytes:
    """Objects and lists in each other."""
    pairs, odd = divmod(levels, 2)
    return b'{"a":[' * pairs + b"{}" * odd + b"]}" * pairs


@pytest.mark.parametrize("levels", [MOST_DEPTH + 4, 900, 980, 100_000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, b'{"input": "x", "metadata": %b}'),
        (RESPONSES, b'{"input": "x", "text": {"format": {"type": "text", "a": %b}}}'),
        (RESPONSES, b'{"input": "x", "reasoning": %b, "stream": true}'),
        (CHAT, b"{%b, " % SAID + b'"chat_template_kwargs": %b}'),
        (CHAT, b"{%b, " % SAID + b'"structured_outputs": {"json": %b}}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x", "y": %b}]}'),
        (TEXT, b'{"prompt": [%b]}'),
        ("/tokenize", b'{"messages": [{"role": "user", "content": "x", "y": %b}]}'),
    ],
)
def test_what_is_nested_too_deep_is_refused(server: RunningServer, path: str, body: bytes, levels: int) -> None:
    message = check(server.http.post(path, content=body % nested(levels)), 400)["message"]
    assert f"{MOST_DEPTH} levels" in message


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_nested_less_deep_is_told_again(server: RunningServer, stream: bool) -> None:
    deep = nested(MOST_DEPTH)
    more = b'"stream": true, ' if stream else b""
    body = b'{"input": "x", "max_output_tokens": 1, %b"metadata": %b}' % (more, deep)
    answer = server.http.post(RESPONSES, content=body)
    assert answer.status_code == 200
    assert deep in answer.content


def test_a_large_body_may_be_as_deep_as_a_small_one(server: RunningServer) -> None:
    for levels, status in ((MOST_DEPTH, 200), (MOST_DEPTH + 2, 400)):
        body = b'{"input": "x", "max_output_tokens": 1, "metadata": %b, "no_such_field": "%b"}'
        answer = server.http.post(RESPONSES, content=body % (nested(levels), b"y" * 200_000))
        assert answer.status_code == status
