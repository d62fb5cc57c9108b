"""Find the migrations and the newest revision from file names alone, without loading Alembic or a driver."""

from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[1]
INSTALLED: Final = PACKAGE / "migrations"
# In a checkout the migrations are next to the packages; in a wheel setup.py has copied them into this one.
SCRIPTS: Final = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "alembic"


def find_newest_revision() -> str:
    """Return the newest revision of this release.

    Migration files are named by revision, in ascending order.
    """
    return max(path.name.partition("_")[0] for path in (SCRIPTS / "versions").glob("[0-9]*_*.py"))
