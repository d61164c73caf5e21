"""How the command line is read: names of vLLM, names that are misspelt, and names that weft has not."""

import argparse

import pytest

from weft.cli import COMMANDS, foreign_options, main, options, serve, structured, with_dashes
from weft.cli.parser import Parser
from weft.engine.options import EngineOptions
from weft.errors import OptionError


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with."""
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


def parsed(*arguments: str) -> argparse.Namespace:
    parser = Parser(prog="weft")
    serve.register(parser.add_subparsers())
    return parser.parse_args(with_dashes(["serve", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--max-sequences", "4"], "--max-sequences is unknown: did you mean --max-num-seqs? (see weft serve"),
        (["serve", "--api_keys=a"], "--api-keys is unknown: did you mean --api-key? (see weft serve --help)"),
        (["generate", "--promt", "x"], "--promt is unknown: did you mean --prompt? (see weft generate --help)"),
        (["bench", "ab", "--varient", "x"], "--varient is unknown: did you mean --variant? (see weft bench ab --help)"),
        (["serve", "--zzz"], "weft: --zzz is unknown (see weft serve --help)"),
        (["serve", "a", "b"], "weft: 'b' is one argument too many (see weft serve --help)"),
        (["chat", "--max-num-seqs", "x"], "--max-num-seqs: invalid int value: 'x' (see weft chat --help)"),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_the_help_of_its_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert line in said(capsys, *arguments)


def test_a_name_may_be_cut_short_and_a_value_may_begin_with_dashes() -> None:
    assert parsed("--max-num-s", "8").max_num_seqs == 8
    assert parsed("--chat-template=--{{ x }}").chat_template == "--{{ x }}"


@pytest.mark.parametrize("name", foreign_options.LACKING)
def test_what_weft_lacks_is_said_by_name(capsys: pytest.CaptureFixture[str], name: str) -> None:
    line = said(capsys, "serve", f"--{name}", "awq", "more")
    assert line == f"weft: --{name} awq more: {foreign_options.LACKING[name]} (see weft serve --help)\n"


@pytest.mark.parametrize(("name", "only"), foreign_options.ONLY_VALUE.items())
def test_a_value_that_is_so_here_is_accepted_and_no_other(
    capsys: pytest.CaptureFixture[str], name: str, only: str
) -> None:
    assert parsed(f"--{name}", only).foreign == ((f"--{name}", only),)
    assert f"--{name}: other is not supported here, only {only}" in said(capsys, "serve", f"--{name}", "other")


def test_what_changes_nothing_is_named_in_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    foreign_options.report_foreign_options(parsed("--trust-remote-code", "--swap-space", "4", "-tp", "1"))
    assert capsys.readouterr().err.splitlines() == [
        "weft: --trust-remote-code has no meaning here and is ignored",
        "weft: --swap-space 4 has no meaning here and is ignored",
        "weft: -tp 1 has no meaning here and is ignored",
    ]


def test_each_foreign_name_is_in_one_table_and_no_option_of_weft() -> None:
    names = [
        *foreign_options.IGNORED_FLAGS,
        *foreign_options.IGNORED_VALUES,
        *foreign_options.ONLY_VALUE,
        *foreign_options.LACKING,
    ]
    assert len(names) == len(set(names))
    parsed()  # argparse refuses a name that is there twice


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtypes_have_the_names_of_vllm(given: str, meant: str) -> None:
    arguments = parsed("--dtype", given)
    assert EngineOptions.of(**options.engine_options(arguments)).dtype == meant


def test_an_unknown_dtype_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "serve", "--dtype", "int3").startswith("weft: dtype 'int3' is not supported; choose auto, ")


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (("a",), "a"),
        (("--model", "a"), "a"),
        (("a", "--model", "a"), "a"),
        (("--model=a", "--port", "1"), "a"),
        ((), None),
    ],
)
def test_the_model_may_be_named_either_way(arguments: tuple[str, ...], model: str | None) -> None:
    found = parsed(*arguments)
    options.choose_model(found)
    assert found.model == model


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_two_models_are_one_too_many(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert said(capsys, command, "a", "--model", "b") == "weft: MODEL a and --model b: give one of them\n"


def test_the_model_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_MODEL", "e")
    for arguments, model in (((), "e"), (("a",), "a"), (("--model", "b"), "b")):
        found = parsed(*arguments)
        options.choose_model(found)
        assert found.model == model


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("--structured-outputs-config.backend", "guidance"), {"backend": "guidance"}),
        (("--guided-decoding-backend", "auto"), {"backend": "auto"}),
        (("--structured_outputs_config.disable_fallback=True",), {"disable_fallback": True}),
        (
            (
                '--structured-outputs-config={"backend": "auto"}',
                "--structured-outputs-config.enable_in_reasoning=false",
            ),
            {"backend": "auto", "enable_in_reasoning": False},
        ),
    ],
)
def test_settings_of_structured_outputs_that_hold_here(arguments: tuple[str, ...], meant: dict[str, object]) -> None:
    assert parsed(*arguments).structured_outputs_config == meant


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--structured-outputs-config.backend", "xgrammar"), "backend 'xgrammar' is not supported here, only auto or"),
        (
            ('--structured-outputs-config={"backend": "outlines"}',),
            "backend 'outlines' is not supported here, only auto",
        ),
        (
            ("--structured-outputs-config.disable_any_whitespace", "true"),
            "disable_any_whitespace True is not supported here, only false",
        ),
        (('--structured-outputs-config={"backand": "auto"}',), "'backand' is not known here: choose of backend, "),
        (("--structured-outputs-config", "guidance"), "'guidance' is not a JSON object"),
        (("--structured-outputs-config.backand", "auto"), "--structured-outputs-config.backand is unknown"),
        (
            ("--structured-outputs-config.reasoning_parser=qwen3", "--reasoning-parser=deepseek_r1"),
            "--reasoning-parser deepseek_r1 and --structured-outputs-config qwen3: give one of them",
        ),
    ],
)
def test_settings_of_structured_outputs_that_do_not(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert line in said(capsys, "serve", *arguments)


def test_the_reasoning_parser_may_be_named_there(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "serve", "--port", "0", "--structured-outputs-config.reasoning_parser", "none-such")
    assert "reasoning_parser='none-such' is unknown: choose auto, none, " in line


def test_structured_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_STRUCTURED_OUTPUTS_CONFIG", '{"backend": "guidance"}')
    assert parsed().structured_outputs_config == {"backend": "guidance"}
    monkeypatch.setenv("WEFT_STRUCTURED_OUTPUTS_CONFIG", '{"backend": "outlines"}')
    with pytest.raises(OptionError, match=r"WEFT_STRUCTURED_OUTPUTS_CONFIG=.* 'outlines' is not supported here"):
        raise parsed().misread


def test_every_option_is_in_the_help() -> None:
    """But for those of vLLM that weft has not, and the fields that --structured-outputs-config names."""
    parser = Parser(prog="weft")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        command.register(commands)
    hidden = [
        name
        for one in commands.choices.values()
        for action in one._actions
        if action.help in (None, argparse.SUPPRESS) and not isinstance(action, foreign_options.ForeignOption)
        for name in action.option_strings
    ]
    assert all(name.startswith(f"--{structured.NAME}.") or name == "--guided-decoding-backend" for name in hidden)
    shown = commands.choices["serve"].format_help()
    for field in structured.FIELDS:
        assert field in shown
