"""Settings, metrics, dependencies and transitions in the code, which derived.py writes into the docs."""

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from api import metrics
from tests.architecture.extras import CLUSTERS, EXTRAS, PROJECT
from tests.architecture.sources import PACKAGES, find_sources, parse
from tests.unit.jobs.test_job import TRANSITIONS
from vectormill.jobs.job import DELETING, JOB_STATES
from worker.devices.backends import BACKENDS

# Modules that processes which plan, chunk or store must not import: torch, its dependents, and the packages
# of all backends.
SERVING_LIBRARIES: Final = tuple(
    dict.fromkeys(
        [
            "torch",
            "transformers",
            "sentence_transformers",
            *(backend.package for backend in BACKENDS.values()),
        ]
    )
)
METRIC_TYPES: Final = re.compile(r"(Counter|Gauge|Histogram|Summary|Info|Enum)(MetricFamily)?")


def find_settings() -> dict[str, FieldInfo]:
    """Return environment variable -> field, for every settings class of every settings.py."""
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
    """Return a setting's default as a user would write it into the environment."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default in ({}, [], (), ""):
        return "unset"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def find_metrics() -> dict[str, tuple[str, str]]:
    """Return metric name -> labels and help, of the tables of readings and of calls of prometheus_client."""
    found: dict[str, tuple[str, str]] = {
        row.name: (", ".join([*table.labels, *row.by]), row.told)
        for table in vars(metrics).values()
        if isinstance(table, metrics.MetricTable)
        for row in table.rows
    }
    for path in find_sources(*PACKAGES):
        for function in ast.walk(parse(path)):
            if isinstance(function, ast.FunctionDef):
                found.update(find_metrics_of(function))
    return found


def find_metrics_of(function: ast.FunctionDef) -> Iterator[tuple[str, tuple[str, str]]]:
    lists = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
            continue
        constructor = ast.unparse(node.func).rpartition(".")[2]
        if METRIC_TYPES.fullmatch(constructor) and isinstance(node.args[0].value, str):
            name, told = (ast.literal_eval(each) for each in node.args[:2])
            named = [keyword.value for keyword in node.keywords if keyword.arg == "labels"]
            labels = [*named, *node.args[2:]]
            yield name, (", ".join(read_labels(labels[0], lists)) if labels else "", told)


def read_labels(node: ast.expr, lists: Mapping[str, ast.List]) -> Iterator[str]:
    """Yield the labels from a list in the call, or from the list in the file that has the given name."""
    written = lists[node.id] if isinstance(node, ast.Name) else node
    assert isinstance(written, ast.List), ast.unparse(node)
    for each in written.elts:
        if isinstance(each, ast.Starred):
            yield from read_labels(each.value, lists)
        else:
            yield ast.literal_eval(each)


def find_dependencies() -> list[str]:
    """Return the names of all direct dependencies that are locked, in the order of pyproject.toml."""
    groups = [PROJECT["dependencies"], *(lines for name, lines in EXTRAS.items() if name not in CLUSTERS)]
    names = (re.split(r"[\[<>=~]", requirement)[0] for group in groups for requirement in group)
    return [name for name in dict.fromkeys(names) if name != "vectormill"]  # extras that include others


def describe_wishes() -> list[tuple[str, ...]]:
    """Return a row for each state of a job with the outcome of every client action, below a row of titles.

    An action of several words is made under a condition, which is mentioned only where it changes the
    outcome.
    """
    wishes = list(dict.fromkeys(wish.split()[0] for wish in TRANSITIONS))
    return [
        ("in state", *wishes),
        *((f"`{state}`", *(describe_wish(wish, state) for wish in wishes)) for state in JOB_STATES),
    ]


def describe_wish(wish: str, state: str) -> str:
    outcomes = {
        name.partition(" ")[2]: describe_outcome(state, table.get(state))
        for name, (_, table) in TRANSITIONS.items()
        if name.split()[0] == wish
    }
    usual = outcomes.pop("")
    return "; ".join(
        [usual, *(f"{when}: {outcome}" for when, outcome in outcomes.items() if outcome != usual)]
    )


def describe_outcome(before: str, after: str | None) -> str:
    if after == before:
        return "stays"
    return {None: "–", DELETING: "it is gone"}.get(after, f"`{after}`")
