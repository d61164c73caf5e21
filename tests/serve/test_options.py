"""Options of a server that are not taken as they are written."""

import argparse

import pytest

from weft.cli import serve
from weft.errors import OptionError
from weft.serve.options import ServeOptions


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("*",), ("*",)),
        (('["*"]',), ("*",)),
        (('["https://a.org", "https://b.org"]', "https://c.org"), ("https://a.org", "https://b.org", "https://c.org")),
        ((" [] ",), ()),
    ],
)
def test_origins_may_be_a_list_in_json_as_in_vllm(given: tuple[str, ...], meant: tuple[str, ...]) -> None:
    assert ServeOptions(allowed_origins=given).allowed_origins == meant


@pytest.mark.parametrize("given", ['["*"', "[1]", "[*]", '[["*"]]', '[""]', ""])
def test_what_is_no_list_of_origins(given: str) -> None:
    with pytest.raises(OptionError, match="allowed_origins"):
        ServeOptions(allowed_origins=(given,))


@pytest.mark.parametrize("text", ['["https://a.org", "https://b.org"]', "https://a.org,https://b.org"])
def test_origins_from_the_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ALLOWED_ORIGINS", text)
    parser = argparse.ArgumentParser()
    serve.register(parser.add_subparsers())
    given = parser.parse_args(["serve"]).allowed_origins
    assert ServeOptions(allowed_origins=tuple(given)).allowed_origins == ("https://a.org", "https://b.org")
