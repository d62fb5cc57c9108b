"""Create `.venv`: Python, uv, a build of torch for this machine, and the packages of requirements.lock.

`make run` installs what the main job needs, `make test` the development tools too, and `make lock` computes
the lock. uv does the work because it installs the whole lock in seconds where pip takes minutes. uv itself is
installed from the package index; where that fails, pip does the same work more slowly. uv does not read pip's
configuration, so it is translated here: users of a mirror, of their own certificates or of a folder of wheels
have configured pip and need to configure nothing else.

Imports only the standard library, because nothing else is installed yet.
"""

import argparse
import ast
import ctypes
import os
import re
import ssl
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
VENV: Final = ROOT / ".venv"
PYTHON: Final = VENV / "bin" / "python"
LOCK: Final = ROOT / "requirements.lock"
LOCK_SETTINGS: Final = ROOT / "deploy" / "lock.toml"
PROJECT: Final = ROOT / "pyproject.toml"
TORCH_CHOICE: Final = VENV / ".torch-index"
OLDEST_PYTHON: Final = (3, 11)
# The extras of pyproject.toml that each Makefile target installs.
EXTRAS: Final[Mapping[str, str]] = {"run": "all", "dev": "all,dev"}
# Those of the lock: all but the ones that load outputs into other stores.
LOCKED_EXTRAS: Final = ("--extra", "all", "--extra", "dev")

# pip's options and uv's variables for them. pip separates values by spaces; uv needs commas between folders.
UV_NAMES: Final[Mapping[str, str]] = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "keyring-provider": "UV_KEYRING_PROVIDER",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
SOURCES: Final = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX")


class SetupFailed(Exception):
    """The environment could not be made; the sentence says what to do."""


def main() -> None:
    """Create the environment that the command line requests."""
    parser = argparse.ArgumentParser(description="Create .venv, or recompute requirements.lock.")
    parser.add_argument("goal", choices=[*EXTRAS, "lock"])
    parser.add_argument(
        "--torch-index", default="", help="the index of another build of torch; it is remembered"
    )
    parser.add_argument("flags", nargs="*", help="further flags of uv for `lock`, after --")
    asked = parser.parse_args()
    try:
        make_venv()
        installer = find_installer(dict(os.environ), list_pip_options())
        if asked.goal == "lock":
            compile_lock(installer, asked.flags)
        else:
            install(installer, EXTRAS[asked.goal], asked.torch_index)
    except (SetupFailed, subprocess.CalledProcessError) as error:
        sys.exit(f"Setting up {VENV.name} failed: {error}")


# -- Python and uv -----------------------------------------------------------------------------------------------------


def make_venv() -> None:
    """Create the virtual environment, or replace one whose Python is gone or too old.

    Raises:
        SetupFailed: this Python is too old, or cannot create virtual environments.
    """
    if sys.version_info < OLDEST_PYTHON:
        raise SetupFailed("Vectormill needs Python 3.11 or newer. Try: make run PYTHON=python3.12")
    code = f"import pip, sys; sys.exit(sys.version_info < {OLDEST_PYTHON})"
    if (
        PYTHON.exists()
        and subprocess.run([str(PYTHON), "-c", code], stderr=subprocess.DEVNULL).returncode == 0
    ):
        return
    try:
        venv.create(VENV, clear=True, with_pip=True)
    except subprocess.CalledProcessError as error:
        hint = (
            "Python cannot create virtual environments here. On Debian and Ubuntu: apt install python3-venv"
        )
        raise SetupFailed(hint) from error


def list_pip_options() -> dict[str, str]:
    """Return pip's configuration, from its files and environment variables, as pip reports it."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "config", "list"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return read_pip_options(printed.splitlines())


def read_pip_options(lines: Iterable[str]) -> dict[str, str]:
    """Return the options that apply to `pip install`, from the lines of `pip config list`.

    As in pip, variables take precedence over the section of the command, and that over the global one:
    https://pip.pypa.io/en/stable/topics/configuration/#precedence-override-order
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in lines:
        name, equals, value = line.partition("=")
        section, _, option = name.partition(".")
        if equals and section in sections:
            sections[section][option] = str(ast.literal_eval(value))
    return sections["global"] | sections["install"] | sections[":env:"]


def translate_pip_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that give uv the same indexes, folders, certificates and proxy as pip."""
    variables: dict[str, str] = {}
    for option, value in options.items():
        name = UV_NAMES.get(option)
        if name is None:
            continue
        words = value.split()
        if name == "UV_FIND_LINKS":
            value = ",".join(words)
        elif name == "UV_NO_INDEX":
            value = "true" if value.lower() in {"1", "true", "yes", "on", "t", "y"} else ""
        elif name in {"UV_EXTRA_INDEX_URL", "UV_CONSTRAINT", "UV_INSECURE_HOST"}:
            value = " ".join(words)
        if value:
            variables[name] = value
    return variables


@dataclass(frozen=True, slots=True)
class Installer:
    """A program that installs packages into the environment: uv, or pip where uv is not available."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    is_uv: bool

    def try_to(self, *arguments: str, environment: Mapping[str, str] | None = None) -> bool:
        """Run the program without output and return whether it succeeded."""
        variables = {**self.environment, **(environment or {})}
        done = subprocess.run([*self.command, *arguments], cwd=ROOT, env=variables, capture_output=True)
        return done.returncode == 0

    def run(self, *arguments: str) -> None:
        """Run the program; a person sees its progress.

        Raises:
            SetupFailed: it did not succeed, and has said why.
        """
        quiet = () if sys.stderr.isatty() else ("--quiet",)
        if subprocess.run([*self.command, *quiet, *arguments], cwd=ROOT, env=self.environment).returncode:
            raise SetupFailed("see above; the package index is the one configured for pip")


def find_installer(environment: Mapping[str, str], options: Mapping[str, str]) -> Installer:
    """Install the version of uv in the lock, and return it; pip if uv cannot be installed.

    Variables of uv that are set already stay unchanged. uv compares the versions of all indexes, as pip does:
    otherwise a mirror with some versions of a package would hide the others. uv trusts the system's
    certificates where there are any, as pip does since 24.2.
    """
    plain = {**environment, "VIRTUAL_ENV": str(VENV), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = Installer((str(PYTHON), "-m", "pip"), plain, is_uv=False)
    uv, wanted = VENV / "bin" / "uv", VENV / "uv.txt"
    locked = read_locked("uv")
    if not wanted.exists() or wanted.read_text(encoding="utf-8") != locked:
        wanted.write_text(locked, encoding="utf-8")
        if not pip.try_to("install", "--no-deps", "--require-hashes", "--requirement", str(wanted)):
            wanted.unlink()
    if not uv.exists():
        say("uv cannot be installed here, so pip is used instead; that takes some minutes.")
        return pip
    defaults = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if (system := ssl.get_default_verify_paths()).cafile or system.capath:
        defaults["UV_SYSTEM_CERTS"] = "true"
    return Installer((str(uv), "pip"), {**defaults, **translate_pip_options(options), **plain}, is_uv=True)


def say(sentence: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(sentence + "\n")


def read_locked(name: str) -> str:
    """Return the entry of a package in the lock: `name==version` and its hashes."""
    lock = LOCK.read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(name)}==\S+ .*(?:\n    .*)*\n", lock, re.MULTILINE)
    if found is None:
        raise SetupFailed(f"{LOCK.name} does not list {name}")
    return found[0]


# -- torch -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A build of torch: the installer's arguments, and the sentence to print after its installation."""

    arguments: tuple[str, ...]
    said: str
    outside: bool = False  # uses a server that pip is not configured for


def choose_torch(
    version: str, index: str, *, has_gpu: bool, has_sources: bool, is_linux: bool
) -> list[TorchBuild]:
    """Return the builds of torch to try, the best first. The last is installed with visible output.

    PyPI's build for Linux includes several GB of CUDA libraries, which are useless without a GPU. The CPU
    build has a local version, `+cpu`, which some mirrors and folders of wheels offer. PyTorch's own index,
    which uv knows, is used only if pip is configured with no source of its own.
    """
    if index:
        return [
            TorchBuild(
                ("--index-url", index, "--reinstall-package", "torch", version), f"{version} from {index}."
            )
        ]
    usual = TorchBuild((version,), f"{version} from the package index.")
    if has_gpu or not is_linux:
        return [usual]
    cpu = f"{version}, the CPU build, since no GPU driver was found; TORCH_INDEX_URL=... chooses another."
    dear = (
        f"{version} with CUDA libraries, although no GPU driver was found: no CPU build is offered here. "
        "TORCH_INDEX_URL=... names an index that has one."
    )
    builds = [TorchBuild((f"{version}+cpu",), cpu), TorchBuild((version,), dear)]
    if not has_sources:
        builds.insert(1, TorchBuild(("--torch-backend", "cpu", version), cpu, outside=True))
    return builds


def has_gpu_driver() -> bool:
    """Return whether a driver of NVIDIA or AMD is installed."""
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def install_torch(installer: Installer, index: str) -> None:
    """Install the build of torch for this machine, unless it is installed and no other is requested."""
    version = next(line for line in read_extra("worker") if line.startswith("torch=="))
    remembered = TORCH_CHOICE.read_text(encoding="utf-8") if TORCH_CHOICE.exists() else ""
    index = index or remembered
    if find_installed("torch").partition("+")[0] == version.partition("==")[2] and index == remembered:
        return
    has_sources = any(installer.environment.get(name) for name in SOURCES)
    has_gpu, is_linux = has_gpu_driver(), sys.platform == "linux"
    *attempts, last = choose_torch(
        version, index, has_gpu=has_gpu, has_sources=has_sources, is_linux=is_linux
    )
    for build in attempts:
        # Give up quickly on a server that this network may not reach, instead of waiting for minutes.
        impatient = {"UV_HTTP_RETRIES": "0", "UV_HTTP_CONNECT_TIMEOUT": "5"} if build.outside else {}
        if build.outside and not installer.is_uv:
            continue
        if installer.try_to("install", *constraints(installer), *build.arguments, environment=impatient):
            break
    else:
        build = last
        installer.run("install", *constraints(installer), *build.arguments)
    say(f"Installed {build.said}")
    TORCH_CHOICE.write_text(index, encoding="utf-8")


def read_extra(name: str) -> list[str]:
    """Return the requirements of one extra of the project."""
    with PROJECT.open("rb") as file:
        extras: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return extras[name]


def find_installed(name: str) -> str:
    """Return the version of a package in the environment; an empty string if it is not installed."""
    code = f"import importlib.metadata as m; print(next((d.version for d in m.distributions(name={name!r})), ''))"
    return subprocess.check_output([str(PYTHON), "-c", code], text=True).strip()


# -- The rest ----------------------------------------------------------------------------------------------------------


def constraints(installer: Installer) -> tuple[str, str]:
    """Return arguments that limit every package to the version in the lock, and for uv to its hashes.

    With hashes, pip would require one for the project itself, so pip gets only the versions.
    """
    if installer.is_uv:
        return "--constraint", str(LOCK)
    versions = re.findall(r"^(\S+==.*?) \\$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    (VENV / "versions.txt").write_text("\n".join(versions), encoding="utf-8")
    return "--constraint", str(VENV / "versions.txt")


def install(installer: Installer, extras: str, torch_index: str) -> None:
    """Install torch, then the project and the packages of these extras, in the versions of the lock."""
    say(f"Installing into {VENV.name}; the first time downloads half a gigabyte.")
    install_torch(installer, torch_index)
    installer.run(
        "install", *constraints(installer), "setuptools"
    )  # installed first, so that building the project needs no index
    installer.run("install", *constraints(installer), "--no-build-isolation", "--editable", f".[{extras}]")


def compile_lock(installer: Installer, flags: list[str]) -> None:
    """Compute the lock from pyproject.toml, with hashes, for every supported platform and Python.

    Hashes are read from the main index alone, because a folder or a second index may have only some files of
    a version.
    """
    alone = {"UV_EXTRA_INDEX_URL": "", "UV_FIND_LINKS": "", "UV_CUSTOM_COMPILE_COMMAND": "make lock"}
    oldest = ".".join(map(str, OLDEST_PYTHON))
    compile_pins(
        replace(installer, environment={**installer.environment, **alone}),
        "--universal", "--python-version", oldest, "--generate-hashes", *LOCKED_EXTRAS, "--group", "setup",
        *flags, "--output-file", LOCK.name, PROJECT.name,
    )  # fmt: skip


def compile_pins(installer: Installer, *arguments: str) -> None:
    """Compute the version of each package that some extras of the project need.

    torch and the CUDA libraries of its builds are left out, since each machine chooses its own build.
    """
    if not installer.is_uv:
        raise SetupFailed("the lock is computed by uv, which cannot be installed here")
    settings = ("--config-file", str(LOCK_SETTINGS), "--no-annotate", "--no-emit-package", "torch")
    installer.run("compile", *settings, *arguments)


if __name__ == "__main__":
    main()
