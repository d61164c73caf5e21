"""What WEFT_... variables do to the command line."""

import pytest

from weft.cli import main


@pytest.mark.parametrize(
    ("name", "value"), [("WEFT_PORT", "tcp://10.0.0.1:8000"), ("WEFT_POLICY", "zz"), ("WEFT_MAX_NUM_SEQS", "many")]
)
def test_other_commands_do_not_mind_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("name", "value"), [("WEFT_POLICY", "zz"), ("WEFT_MAX_NUM_SEQS", "many"), ("WEFT_API_KEY", ",")]
)
def test_a_wrong_one_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["serve"]) == 2
    assert f"weft: {name}='{value}'" in capsys.readouterr().err


def test_what_kubernetes_sets_for_a_service_called_weft_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("WEFT_MAX_NUM_SEQS", "")
    assert main(["serve", "--block-size", "0"]) == 2  # so that it ends before it serves
    assert "block_size=0" in capsys.readouterr().err
