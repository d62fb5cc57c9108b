"""Packages that are no dependencies of ours, each choice in an environment that is made once and kept."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from deploy.environment import VENV, read_pip_options, translate_pip_options
from tests.architecture.sources import ROOT

UV: Final = VENV / "bin" / "uv"
# Clusters, which are used beside our own packages.
CLUSTERS: Final = {"ray": "ray==2.60.0", "daft": "daft==0.7.26", "spark": "pyspark==4.3.0"}

STRATEGY: Final = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "true"}


def make_environment(name: str, packages: Sequence[str]) -> Path:
    """Return the Python that has these packages, of an environment made once for each choice of versions."""
    folder = name_folder(name, (sys.version, *packages))
    python, is_complete = folder / "bin" / "python", folder / "complete"
    if not is_complete.exists():
        subprocess.run((sys.executable, "-m", "venv", "--clear", str(folder)), check=True)
        pip = (str(python), "-m", "pip", "--disable-pip-version-check")
        listed = subprocess.run((*pip, "config", "list"), check=True, capture_output=True, text=True).stdout
        variables = translate_pip_options(read_pip_options(listed.splitlines()))
        uv = (str(UV), "pip", "install", "--python", str(python))
        install = uv if UV.exists() else (*pip, "install", "--quiet")
        subprocess.run((*install, *packages), check=True, env={**STRATEGY, **variables, **os.environ})
        is_complete.touch()
    return python


def make_node_package(name: str, version: str) -> Path:
    """Return the folder of a package of npm with its dependencies, installed once for each version."""
    if shutil.which("npm") is None:
        pytest.skip(f"{name} runs on Node.js, and there is no npm here: install npm")
    folder = name_folder(name, (version,))
    if not (folder / "complete").exists():
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder))
        subprocess.run(("npm", "install", *options, f"{name}@{version}"), check=True)
        (folder / "complete").touch()
    return folder / "node_modules" / name


def name_folder(name: str, wanted: Sequence[str]) -> Path:
    """Return the folder that keeps an environment with these versions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    return cache / "vectormill-tests" / f"{name}-{digest}"


def make_cluster_variables(name: str, *others: Path) -> dict[str, str]:
    """Return the environment variables with which our Python finds a cluster's and other packages after its own."""
    if name == "spark" and "JAVA_HOME" not in os.environ and shutil.which("java") is None:
        pytest.skip("Spark runs on Java, and there is none here: install default-jre-headless")
    packages = (find_packages(make_environment(name, (CLUSTERS[name],))), *others)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *packages))),
        "PYSPARK_PYTHON": sys.executable,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "200",  # on a machine that is busy
        "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1",
    }


def find_packages(python: Path) -> Path:
    """Return the folder of an environment with its packages, for the path of another Python of the same version."""
    (folder,) = python.parent.parent.glob("lib/python*/site-packages")
    return folder
