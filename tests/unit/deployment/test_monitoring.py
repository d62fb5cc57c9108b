"""Board and alerts name metrics and labels that exist, and every alert has its page.

No Prometheus is needed but for the last test, which says so where promtool is missing.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.architecture.facts import find_metrics

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
MONITOR = (ROOT / "docs/MONITOR.md").read_text(encoding="utf-8")
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
BOARD: dict[str, Any] = json.loads((GRAFANA / "vectormill.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
METRICS = {
    name: {label for label in labels.split(", ") if label} for name, (labels, _) in find_metrics().items()
}
# What Prometheus and a histogram add to the labels that are ours.
ADDED_LABELS = {"le", "instance", "job"}
NAME = re.compile(r"\bvectormill_[a-z0-9_]+\b(?:\{(?P<selector>[^}]*)\})?")
LABEL = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def find_expressions() -> dict[str, str]:
    """Where it stands -> every PromQL expression of the board and of the alerts."""
    of_panels = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    }
    of_variables = {
        variable["name"]: variable["definition"]
        for variable in BOARD["templating"]["list"]
        if variable["type"] == "query"
    }
    return of_panels | of_variables | {rule["alert"]: rule["expr"] for rule in ALERTS}


def find_unknown(expression: str) -> list[str]:
    """Metrics and labels of the expression that nothing has."""
    unknown = []
    for match in NAME.finditer(expression):
        name = match[0].partition("{")[0]
        family = next(
            (name.removesuffix(part) for part in HISTOGRAM_PARTS if name.removesuffix(part) in METRICS), name
        )
        if family not in METRICS:
            unknown.append(name)
            continue
        labels = set(LABEL.findall(re.sub(r'"[^"]*"', "", match["selector"] or "")))
        unknown += [f"{name}{{{label}}}" for label in labels - METRICS[family] - ADDED_LABELS]
    return unknown


EXPRESSIONS = find_expressions()


def test_every_expression_names_metrics_and_labels_that_exist() -> None:
    unknown = {place: find_unknown(expression) for place, expression in EXPRESSIONS.items()}
    assert {place: names for place, names in unknown.items() if names} == {}


def test_what_several_api_processes_tell_alike_is_never_added_up_over_them() -> None:
    """Their own counters are of requests and queries; all else comes from Postgres, and is the same in each."""
    own = re.compile(r"vectormill_(http|query|submitted)_")
    for place, expression in EXPRESSIONS.items():
        if (
            NAME.search(expression)
            and not own.search(expression)
            and place not in ("model", "VectormillApiAbsent")
        ):
            summed = re.search(r"\b(sum|avg)\b[^(]*\(\s*(rate\(|increase\()?vectormill_", expression)
            assert summed is None, place
            assert re.search(r"\bmax\b", expression), place


def test_the_board_is_as_grafana_wants_it() -> None:
    schema = json.loads((ROOT / "tests/schemas/grafana-dashboard.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(BOARD)
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    sections = re.findall(r"^### (Vectormill\w+)\n\n(?=\S)", MONITOR, re.MULTILINE)
    assert sections == [rule["alert"] for rule in ALERTS]


def test_every_alert_is_seen_to_fire_in_the_tests_of_the_rules() -> None:
    played = (PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"\bVectormill\w+", played)) == {rule["alert"] for rule in ALERTS}


def test_what_is_mounted_and_loaded_is_there() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for name in ("prometheus", "grafana"):
        assert compose[name]["profiles"] == ["monitoring"]
        mounted = [volume.split(":")[0] for volume in compose[name]["volumes"] if volume.startswith("./")]
        assert mounted
        assert all((ROOT / path).exists() for path in mounted)
    scraping = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert scraping["rule_files"] == ["/etc/prometheus/alerts.yml"]
    targets = {
        target
        for job in scraping["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    assert {target.partition(":")[0] for target in targets} <= compose.keys()
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/vectormill.yml").read_text())[
        "providers"
    ]
    boards = [volume.split(":")[1] for volume in compose["grafana"]["volumes"] if "vectormill.json" in volume]
    assert boards == [f"{provider['options']['path']}/vectormill.json"]


@pytest.mark.parametrize("command", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed, so the rules are not played")
    done = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
