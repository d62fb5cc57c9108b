"""The wheel and the sdist: built of this tree, compared with it, and used from another folder than the checkout's."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.architecture.sources import PACKAGES, ROOT
from tests.database import execute
from tests.services import connected_engine
from vectormill import __version__
from vectormill.db.migrations import find_missing_revision

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What a wheel is made of; also what pip copies of a checkout.
SOURCES = (*PACKAGES, "alembic", "setup.py", "pyproject.toml", "README.md", "LICENSE")
# What processes leave behind, and what only a checkout needs.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
TIMEOUT_SECONDS = 300


def expected_files() -> dict[str, bytes]:
    """Name in the wheel -> content, of every file in the packages and of alembic/, which has another name there."""
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for folder in (*PACKAGES, "alembic")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    return {
        f"vectormill/migrations/{name.removeprefix('alembic/')}"
        if name.startswith("alembic/")
        else name: content
        for name, content in files.items()
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and the wheel that is built from it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=LEFT_OUT)
        else:
            shutil.copy(ROOT / name, tree / name)
    run("-m", "build", "--no-isolation", "--quiet", str(tree), cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip makes of the wheel, without what it depends on: that is taken from the environment of the tests."""
    target = tmp_path_factory.mktemp("installed")
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile")
    run("-m", "pip", "install", *flags, "--target", str(target), str(wheel), cwd=target)
    return target


def run(*arguments: str, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_wheel_has_every_file_of_the_packages_and_the_migrations_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    expected = expected_files()
    assert sorted(contents) == sorted(expected), (
        "setup.py says what is a package, package-data what else is taken"
    )
    assert contents == expected
    assert "vectormill/migrations/versions/0026_schema.py" in contents


def test_an_sdist_has_what_a_wheel_is_built_of_and_no_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in (*PACKAGES, "alembic")
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert sources <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {"tests", "docs", "benchmarks", "deploy", "examples"}


def test_the_wheel_s_version_is_that_which_the_code_tells(wheel: Path) -> None:
    assert PROJECT["version"] == __version__
    assert wheel.name == f"vectormill-{__version__}-py3-none-any.whl"


def test_an_installed_wheel_migrates_a_database_from_any_folder(
    installed: Path, database_url: str, admin: Engine, tmp_path: Path
) -> None:
    execute(admin, "DROP SCHEMA vectormill CASCADE")
    arguments = ("-m", "vectormill.cli", "migrate")
    run(*arguments, cwd=tmp_path, PYTHONPATH=str(installed), VECTORMILL_DATABASE_URL=database_url)
    with connected_engine(database_url) as engine:
        assert find_missing_revision(engine) is None


def test_an_installed_wheel_runs_its_own_code_and_tells_its_own_revision(
    installed: Path, tmp_path: Path
) -> None:
    place = "import vectormill, vectormill.db.scripts as s; print(vectormill.__file__, s.SCRIPTS)"
    package, scripts = run("-c", place, cwd=tmp_path, PYTHONPATH=str(installed)).split()
    assert package == str(installed / "vectormill/__init__.py")
    assert scripts == str(installed / "vectormill/migrations")
    told = run("-m", "vectormill.cli", "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    assert told.splitlines()[0] == f"vectormill {__version__}"
    assert "COMMAND [ARGS]" in run("-m", "vectormill.cli", "--help", cwd=tmp_path, PYTHONPATH=str(installed))


def test_the_command_that_installs_an_extra_of_a_wheel_works_as_printed(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    ask = "from vectormill.extras import compose_install; print(compose_install('all'))"
    program, *command = shlex.split(run("-c", ask, cwd=tmp_path, PYTHONPATH=str(installed)))
    assert program == "pip"
    said = run(
        "-m", "pip", *command, "--dry-run", "--no-deps", "--no-index", "--ignore-installed", cwd=tmp_path
    )
    assert f"vectormill @ {wheel.as_uri()}" in said or f"Processing {wheel}" in said
    assert "Would install vectormill" in said
    assert "WARNING" not in said


def test_the_changelog_tells_of_this_version_and_the_newest_first() -> None:
    sections = re.findall(
        r"^## \[(\S+)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert sections[0] == ("Unreleased", "")
    assert __version__ in [version for version, _ in sections]
    dates = [date for _, date in sections[1:]]
    assert dates == sorted(dates, reverse=True)
