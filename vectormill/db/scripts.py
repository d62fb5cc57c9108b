"""The place of the migrations, and the newest of them. Reads names of files: loads neither Alembic nor a
driver.
"""

from pathlib import Path
from typing import Final


def find_scripts(package: Path) -> Path:
    """Return the folder of migrations: beside the packages in a checkout, and in this package, where setup.py puts it,
    in a wheel.
    """
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "alembic"


SCRIPTS: Final = find_scripts(Path(__file__).resolve().parents[1])


def find_newest_revision() -> str:
    """Return the newest revision of this release. Files of migrations are named for their revisions, in
    order.
    """
    return max(path.name.partition("_")[0] for path in (SCRIPTS / "versions").glob("[0-9]*_*.py"))
