"""Chat templates that are broken or never end: the operator is told at the start, and a chat ends in any case."""

import shutil
from pathlib import Path

import pytest

from tests.serve.attacks.test_connection import megabytes
from tests.serve.attacks.test_supervision import started
from tests.serve.running import RunningServer
from tests.serve.test_bad_input import CHAT, check
from weft.text.chat import MOST_CPU_S

ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
MODEL = Path(__file__).parents[3] / "src" / "weft" / "default_model"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS, "takes more than 2 s of processor time or 1024 MiB of memory to render a greeting"),
        (DOUBLING, "takes more than 2 s of processor time or 1024 MiB of memory to render a greeting"),
        ("{{ 'x' * 10 ** 11 }}", "takes more than 2 s of processor time or 1024 MiB of memory to render a greeting"),
        ("{% for %}", "is broken"),
        ("{{ ''.__class__.__mro__ }}", "sandbox forbids"),
    ],
    ids=["endless", "doubling", "huge", "no template", "forbidden"],
)
def test_a_broken_template_ends_the_start(template: str, said: str) -> None:
    done = started("--chat-template", template)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("weft: ")
    assert said in line
    assert line.endswith("give another with --chat-template")


def test_a_models_own_template_is_tried_as_well(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(ENDLESS)
    done = started(str(tmp_path / "model"))
    assert done.returncode == 2
    assert "to render a greeting; give another with --chat-template" in done.stderr


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "template").write_bytes(b"\xff{")
    done = started("--chat-template", str(tmp_path / "template"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot be read" in line


def test_what_ends_for_a_greeting_and_not_for_others_is_bounded() -> None:
    """And a template that refuses a greeting serves those whom it does not refuse; the log tells of it."""
    template = (
        "{% if messages[0].content == 'Hello' %}{{ raise_exception('say more') }}{% endif %}"
        "{% if messages[0].content == 'endless' %}" + ENDLESS + "{% endif %}"
        "{% if messages[0].content == 'long' %}{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}{% endif %}"
        "{{ messages[0].content }}"
    )
    options = ("--policy", "chunked", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "64MiB")
    server = RunningServer(*options, "--chat-template", template)
    try:
        assert "say more" in server.log
        before = megabytes(server.process.pid)
        for content, said in (("endless", f"{MOST_CPU_S:g} s of processor time"), ("long", "characters")):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            assert said in check(server.post(CHAT, body), 400)["message"]
        assert megabytes(server.process.pid) - before < 200
        body = {"messages": [{"role": "user", "content": "short"}], "max_tokens": 1}
        assert server.post(CHAT, body).status_code == 200
    finally:
        server.kill()
