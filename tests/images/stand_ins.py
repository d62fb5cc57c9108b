"""Images that stand in for those of a registry, and a package index for the builds, so that no registry is needed.

They have the names, folders, users and variables of the real ones. A Debian made by debootstrap is under all of them.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Final

import yaml

from deploy.environment import (
    LOCK,
    PROJECT,
    TORCH_CHOICE,
    compile_pins,
    find_installed,
    find_installer,
    list_pip_options,
)
from tests.http_server import QuietHandler, serving_http
from tests.images.engine import Engine
from vectormill.embedded.binaries import find_postgres, find_valkey_server

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
# Debian 12 has the Python 3.11 of our images.
DEBIAN: Final = "bookworm"
PACKAGES: Final = "ca-certificates,netbase,python-is-python3,python3-venv,tzdata"
# The extras of both Dockerfiles.
EXTRAS: Final = ("server", "worker", "flower", "fsspec", "tracing")


@contextmanager
def serve_packages(folder: Path) -> Iterator[str]:
    """Yield the address of an index with the packages of both images, in the versions of the lock, for Linux.

    They are downloaded with the configuration of this machine's pip, of which the images need to know nothing.
    torch comes in the build that is installed here.
    """
    pins, tools = folder / "pins.txt", folder / "tools.txt"
    tools.write_text("build\nsetuptools\n")
    compile_pins(
        find_installer(dict(os.environ), list_pip_options()), "--quiet", "--constraint", str(LOCK),
        *(word for name in EXTRAS for word in ("--extra", name)), "--group", "setup", "--python-version", "3.11",
        "--output-file", str(pins), str(PROJECT), str(tools),
    )  # fmt: skip
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder / "files")]
    subprocess.run([*pip, "--requirement", str(pins)], check=True)
    index = TORCH_CHOICE.read_text() if TORCH_CHOICE.exists() else ""
    source = ["--index-url", index] if index else []
    subprocess.run([*pip, *source, f"torch=={find_installed('torch')}"], check=True)
    for file in (folder / "files").iterdir():
        name = re.sub(r"[-_.]+", "-", file.name.partition("-")[0]).lower()
        (folder / "simple" / name).mkdir(parents=True, exist_ok=True)
        file.rename(folder / "simple" / name / file.name)
    handler = partial(QuietFiles, directory=str(folder))
    with serving_http(handler) as url:
        yield f"{url}/simple"


class QuietFiles(SimpleHTTPRequestHandler, QuietHandler):
    """A handler that serves files and writes no log."""


def build_stand_ins(engine: Engine, folder: Path, index: str) -> None:
    """Build an image under the name of each image that our Dockerfiles and our services begin with."""
    (python,) = {
        name
        for dockerfile in (ROOT / "deploy").glob("Dockerfile.*")
        for name in re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)
    }
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, folder / "debian"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    changes = ["--change", f"ENV PIP_INDEX_URL={index} UV_DEFAULT_INDEX={index}"]
    with subprocess.Popen(["tar", "-C", folder / "debian", "-c", "."], stdout=subprocess.PIPE) as tar:
        engine.docker("import", *changes, "-", python, given=tar.stdout)
    shutil.rmtree(folder / "debian")

    postgres = find_postgres(None).directory.parent
    unneeded = shutil.ignore_patterns("include", "*.a", "__pycache__")
    programs = new_context(folder, "postgres")
    for each in (postgres, postgres.with_name(postgres.name + ".libs")):
        shutil.copytree(each, programs / each.name, symlinks=True, ignore=unneeded)
    shutil.copy(find_valkey_server(), new_context(folder, "valkey"))
    for name in ("postgres", "valkey"):
        image = services[name]["image"]
        options = ("--network", "host", "--build-arg", f"SYSTEM={python}", "--tag", image)
        engine.docker("build", *options, str(folder / name))


def new_context(folder: Path, name: str) -> Path:
    """Copy the files of an image, and return an empty folder for its programs."""
    programs = Path(shutil.copytree(HERE / name, folder / name)) / "programs"
    programs.mkdir()
    return programs
