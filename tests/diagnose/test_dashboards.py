"""The Grafana dashboard and the Prometheus rules: they parse, and every metric that they name is exported."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from weft.observe.metrics import ServerMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD, RULES = DEPLOY / "grafana-dashboard.json", DEPLOY / "prometheus-rules.yml"
METRIC = re.compile(r"\b(?:weft_|vllm:)\w+")


def exported() -> dict[str, set[str]]:
    """The names of all samples, with the names of their labels."""
    page = ServerMetrics("m")
    page.record_response("/health", 200)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page.render({"0"}).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[str]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for rule in rules():
        yield rule["expr"]


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_metric_is_exported() -> None:
    known = exported()
    named = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(named) > 25
    assert named - known.keys() == set()


def test_every_label_is_exported() -> None:
    known = exported()
    for expression in expressions():
        for name, inside in re.findall(r"((?:weft_|vllm:)\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)\s*=~?", inside)) - {"instance"}  # Prometheus adds that
            assert labels <= known[name], expression


def test_values_of_labels_are_exported() -> None:
    text = ServerMetrics("m").render({"0"}).decode()
    for expression in expressions():
        for label, value in re.findall(r'(kind|part|phase|promise|result)="(\w+)"', expression):
            assert f'{label}="{value}"' in text, expression


def test_other_texts_name_metrics_that_exist() -> None:
    known = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported()} | exported().keys()
    for text in (rule["annotations"]["inspect"] for rule in rules()):
        assert set(METRIC.findall(text)) <= known, text


def test_a_dashboard_has_distinct_panels_that_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
    assert all(panel.get("description") for panel in panels if panel["type"] != "row")


def test_brackets_of_expressions_are_balanced() -> None:
    for expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression


def test_an_alert_says_what_to_inspect() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 10
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "inspect"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
