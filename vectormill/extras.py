"""Say how to install a package that is missing: the command for an extra of what is installed here."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vectormill.domain.errors import ConfigurationError


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
