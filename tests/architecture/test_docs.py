"""What a user can meet (a setting, a metric, an error, a state) stands in the docs, and the docs name nothing else."""

import ast
import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

import vectormill.domain
import vectormill.domain.errors
from tests.architecture.sources import DOCS, PACKAGES, ROOT, find_sources, parse
from vectormill.cli.app import main
from vectormill.domain.errors import VectormillError
from vectormill.domain.jobs.item import ITEM_ERROR_CODES

METRIC_TYPES = re.compile(r"(Counter|Gauge|Histogram|Summary|Info|Enum)(MetricFamily)?")
SETTING_ROW = re.compile(r"^\| `(VECTORMILL_[A-Z0-9_]+)` \| (.*?) \|", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
# A block that shows a command and what it prints; a line of … stands for lines that are left out.
SHOWN = re.compile(r"^```\n\$ vectormill (plan .*)\n([^`]*)^```$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def read_doc(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def find_words(name: str) -> set[str]:
    """Everything a page sets in code type."""
    return set(CODE.findall(read_doc(name)))


def find_settings() -> dict[str, FieldInfo]:
    """Variable -> field, for every settings class of every settings.py."""
    fields = {}
    for path in find_sources(*PACKAGES):
        if path.name == "settings.py":
            module = importlib.import_module(".".join(path.with_suffix("").parts))
            for value in vars(module).values():
                if isinstance(value, type) and issubclass(value, BaseSettings) and value is not BaseSettings:
                    prefix = value.model_config["env_prefix"]
                    fields.update(
                        {prefix + name.upper(): field for name, field in value.model_fields.items()}
                    )
    return fields


def describe_default(field: FieldInfo) -> str:
    """The default as a user would write it into the environment."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default in ({}, [], (), ""):
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def find_error_names() -> set[str]:
    """Every class that descends from VectormillError, wherever it stands."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path in find_sources(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    }
    errors = {VectormillError.__name__}
    while found := {name for name, parents in bases.items() if parents & errors} - errors:
        errors |= found
    return errors


def find_error_codes() -> set[str]:
    """The last parts of problem types, and the codes of item errors."""
    kinds = vars(vectormill.domain.errors).values()
    errors = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, VectormillError)]
    return {error.code for error in errors} | set(ITEM_ERROR_CODES)


def find_states() -> set[str]:
    """The members of every …_STATES tuple of the domain."""
    states: set[str] = set()
    for module in pkgutil.walk_packages(vectormill.domain.__path__, "vectormill.domain."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_STATES"):
                states.update(value)
    return states


def find_metrics() -> set[str]:
    """Names given to the constructors of prometheus_client."""
    names = set()
    for path in find_sources(*PACKAGES):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            constructor = ast.unparse(node.func).rpartition(".")[2]
            if METRIC_TYPES.fullmatch(constructor) and isinstance(node.args[0].value, str):
                names.add(node.args[0].value)
    return names


def test_every_setting_stands_in_the_configuration_page_with_its_default() -> None:
    documented = dict(SETTING_ROW.findall(read_doc("CONFIGURATION.md")))
    assert documented == {variable: describe_default(field) for variable, field in find_settings().items()}


def test_every_error_is_explained_to_whoever_meets_it() -> None:
    errors = find_error_names()
    assert {"VectormillError", "LeaseLost", "ApiError"} <= errors
    assert errors <= find_words("ERRORS.md")


def test_every_stable_code_is_explained() -> None:
    assert find_error_codes() <= find_words("ERRORS.md")


def test_every_state_is_described() -> None:
    states = find_states()
    assert {"queued", "leased", "completed_with_errors"} <= states
    assert states <= find_words("STATES.md")


def test_every_metric_is_described() -> None:
    metrics = find_metrics()
    assert metrics
    assert metrics <= find_words("OPERATIONS.md")


def test_no_metric_is_described_that_does_not_exist() -> None:
    described = {word for word in find_words("OPERATIONS.md") if re.fullmatch(r"vectormill_[a-z0-9_]+", word)}
    assert described <= find_metrics()


def test_every_direct_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[\[<>=~]", requirement)[0] for group in groups for requirement in group}
    reasons = set(re.findall(r"^\| ([A-Za-z][\w-]*) \| \S", read_doc("DEPENDENCIES.md"), re.MULTILINE))
    assert reasons - {"package"} == names


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        shown
        for page in (ROOT / "README.md", DOCS / "PLANS.md")
        for shown in SHOWN.findall(page.read_text(encoding="utf-8"))
    ],
    ids=lambda value: value if value.startswith("plan") else "",
)
def test_the_docs_show_the_plans_that_are_made(
    arguments: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(arguments.split())
    printed = capsys.readouterr()
    rest = printed.out + printed.err
    for part in filter(None, shown.split("…\n")):
        assert part in rest
        rest = rest.partition(part)[2]
    assert "…" in shown or not rest


def test_five_inventories_are_shown_in_short_and_six_whole() -> None:
    assert len(SHOWN.findall((ROOT / "README.md").read_text(encoding="utf-8"))) == 5
    assert len(SHOWN.findall(read_doc("PLANS.md"))) == 6


def test_the_architecture_page_can_be_read_in_one_sitting() -> None:
    lines = read_doc("ARCHITECTURE.md").splitlines()
    assert sum(not line.startswith("|") for line in lines) <= 150, "tables are looked up, all else is read"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name
)
def test_every_link_leads_to_a_file(page: Path) -> None:
    broken = [
        target
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken
