"""deploy/: what can be checked of it without building an image or installing a unit."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from weft.cli import make_parser
from weft.serve.http.middleware import OPEN_PATHS
from weft.serve.protocols.openapi import openapi_document

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*"))
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT"}


def instructions(file: Path) -> list[tuple[str, str]]:
    """Name and arguments of each, with lines that go on joined."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest.strip()) for line in lines if line.strip() for name, _, rest in [line.partition(" ")]]


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [file.name for file in DOCKERFILES] == ["Dockerfile", "Dockerfile.cuda"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile(file: Path) -> None:
    found = instructions(file)
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= KNOWN
    assert not found[0][1].endswith(":latest")
    for name, rest in found:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    names = [name for name, _ in found]
    last_copy = len(names) - 1 - names[::-1].index("COPY")
    assert names.index("USER") > last_copy, "it does not run as root"
    by_name = dict(found)
    command = json.loads(by_name["ENTRYPOINT"])
    assert command[0] == "weft"
    chosen = make_parser().parse_args(command[1:])
    assert chosen.command == "serve"
    assert chosen.host == "0.0.0.0", "it is reached from outside of the container"
    assert by_name["EXPOSE"] == str(chosen.port)
    make_parser().parse_args([*command[1:], "--model", "/models/m"])  # as README.md goes on


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_health_check(file: Path) -> None:
    check = dict(instructions(file))["HEALTHCHECK"]
    code = json.loads(check[check.index("[") :])[-1]
    compile(code, "check", "exec")
    port, path = re.findall(r"http://127\.0\.0\.1:(\d+)(/[a-z]+)'", code)[0]
    assert port == dict(instructions(file))["EXPOSE"]
    assert path in OPEN_PATHS, "it has no key"
    assert path in openapi_document(with_keys=True)["paths"]


def test_what_an_image_installs_is_what_weft_needs() -> None:
    wanted = re.search(r'"(torch>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    assert wanted[1] in (DEPLOY / "Dockerfile").read_text()


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "weft.service")
    return parser


def test_the_unit_starts_a_server_and_lets_streams_finish(unit: configparser.ConfigParser) -> None:
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program == "/opt/weft/bin/weft"
    chosen = make_parser().parse_args(arguments)
    assert chosen.command == "serve"
    assert float(unit["Service"]["TimeoutStopSec"]) > chosen.shutdown_timeout
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "weft.service").read_text()
    program = shutil.which("true")
    assert program is not None
    copy = tmp_path / "weft.service"  # with a program that is there
    copy.write_text(text.replace("/opt/weft/bin/weft", program))
    assert complaints(copy) == []
    copy.write_text(copy.read_text().replace("RestartSec=", "RestartSek="))
    assert "RestartSek" in "".join(complaints(copy)), "it does look"


def complaints(unit: Path) -> list[str]:
    """What systemd says of a unit, without what it says of others that it reads on the way."""
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if "weft.service" in line]
