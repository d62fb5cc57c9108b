"""Find the migrations and the newest revision from file names alone, without loading Alembic or a driver."""

from pathlib import Path
from typing import Final


def find_scripts(package: Path) -> Path:
    """Return the folder of migrations.

    In a checkout it is next to the packages; in a wheel it is inside this package, where setup.py copies it.
    """
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "alembic"


SCRIPTS: Final = find_scripts(Path(__file__).resolve().parents[1])


def find_newest_revision() -> str:
    """Return the newest revision of this release.

    Migration files are named by revision, in ascending order.
    """
    return max(path.name.partition("_")[0] for path in (SCRIPTS / "versions").glob("[0-9]*_*.py"))
