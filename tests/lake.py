"""A catalog of Iceberg for tests, by the real pyiceberg in an environment of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.environments import find_packages, make_environment

PYICEBERG: Final = "pyiceberg==0.12.0"


def find_pyiceberg() -> Path:
    return find_packages(make_environment("iceberg", (PYICEBERG,)))


@contextmanager
def configured_catalog(monkeypatch: pytest.MonkeyPatch, **properties: str) -> Iterator[Any]:
    """Yield a catalog `lake` with a namespace `papers`, which our code and its child processes find too.

    Underscores in names of properties stand for hyphens, and two of them for dots.
    """
    for name, value in {"type": "sql", **properties}.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name.upper()}", value)
    # Our own packages come first.
    monkeypatch.setattr(sys, "path", [*sys.path, str(find_pyiceberg())])
    import pyiceberg.catalog
    from pyiceberg.utils.config import Config

    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())  # it was read when it was imported
    with pyiceberg.catalog.load_catalog("lake") as lake:
        lake.create_namespace("papers")
        yield lake
