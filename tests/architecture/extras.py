"""Find what an environment with some of our extras contains, by pyproject.toml and packages' metadata."""

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import Final

from packaging.requirements import Requirement

from tests.architecture.sources import PACKAGES, ROOT

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: Final[Mapping[str, list[str]]] = PROJECT["optional-dependencies"]
# The extras for clusters that exist already (vectormill/integrations): neither part of `all` nor locked.
CLUSTERS: Final = ("daft", "ray", "spark")


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def find_distributions(*extras: str) -> frozenset[str]:
    """Return the distributions that pip installs for the project with these extras, on this platform."""
    pending = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        wanted = Requirement(pending.pop())
        name = normalize(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        if name == "vectormill":
            pending += [line for extra in wanted.extras for line in EXTRAS[extra]]
        else:
            pending += [line for line in require_of(name) if applies(Requirement(line), wanted.extras)]
    return frozenset(name for name, _ in seen)


def require_of(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # a package for another platform
        return []


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


@cache
def find_importable(*extras: str) -> frozenset[str]:
    """Return the top-level modules of such an environment besides the standard library and our own."""
    there = find_distributions(*extras)
    return frozenset(
        module
        for module, distributions in packages_distributions().items()
        if any(normalize(each) in there for each in distributions)
    )


@cache
def find_foreign(*extras: str) -> frozenset[str]:
    """Return the top-level modules that are installed here but would be missing from such an environment."""
    here = packages_distributions().keys() - sys.stdlib_module_names - {*PACKAGES, "_distutils_hack"}
    return frozenset(here) - find_importable(*extras)
