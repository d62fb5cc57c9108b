"""The user account that an embedded server runs as, and directories that this user can reach.

Postgres refuses to run as root. Started by root, it runs as an existing user without privileges, `postgres`
or `nobody`; no user is added. Its files must be in directories that this user can enter. The mode of
directories that do not belong to Vectormill is never changed, so when root's own directories are closed to
others, the files go to one of OUR_PLACES.
"""

import os
import pwd
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vectormill.embedded.errors import EmbeddedServerFailed
from vectormill.files.outputs import open_replacement

# /var/lib survives a reboot; the second is for systems where /var/lib is read-only.
OUR_PLACES = (Path("/var/lib/vectormill"), Path("/var/tmp/vectormill-root"))  # noqa: S108 - checked by _is_ours


@dataclass(frozen=True, slots=True)
class Account:
    """A user that is not root, and its group."""

    name: str
    uid: int
    gid: int

    def can_enter(self, directory: Path) -> bool:
        """Return whether the user may traverse the directory and all its parents, by their mode bits.

        An access control list may allow more or less; in that case Postgres reports the error itself.
        """
        directory = directory.resolve()
        return all(self._may_traverse(part.stat()) for part in (directory, *directory.parents))

    def _may_traverse(self, status: os.stat_result) -> bool:
        if status.st_uid == self.uid:
            return bool(status.st_mode & stat.S_IXUSR)
        if status.st_gid == self.gid:
            return bool(status.st_mode & stat.S_IXGRP)
        return bool(status.st_mode & stat.S_IXOTH)


def server_account() -> Account | None:
    """Return the user that Postgres runs as when this process is root; None for any other user.

    A process without root runs Postgres as its own user.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "_postgres", "nobody"):  # macOS calls the user _postgres
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid > 0:  # on macOS the uid of nobody is -2
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedServerFailed(
        "Postgres refuses to run as root, and there is no user postgres or nobody to run it as; "
        "add one, or run vectormill as an ordinary user"
    )


def owner_of(directory: Path) -> Account | None:
    """Return the owner of the directory; None if this process is the owner."""
    status = directory.stat()
    if status.st_uid == os.geteuid():
        return None
    try:
        entry = pwd.getpwuid(status.st_uid)
    except KeyError:
        return Account(f"uid {status.st_uid}", status.st_uid, status.st_gid)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def place_of_ours(account: Account) -> Path:
    """Return a directory owned by root that the account can enter, for files it could not reach elsewhere."""
    for place in (*OUR_PLACES, Path(tempfile.gettempdir()) / "vectormill-root"):
        try:
            if not place.is_dir():
                make_directory(place, 0o755)
        except OSError:
            continue  # the parent is missing or read-only: try the next place
        if _is_ours(place) and account.can_enter(place):
            return place
    raise EmbeddedServerFailed(
        f"Postgres runs as user {account.name} because root may not run it, but {account.name} can reach no directory "
        f"for its files: tried {', '.join(map(str, OUR_PLACES))} and the temporary directory"
    )


def _is_ours(directory: Path) -> bool:
    """Return whether only root can have written to the directory.

    /tmp is open to all users, and its names can be guessed.
    """
    status = directory.lstat()
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not open_to_others


def make_directory(directory: Path, mode: int, account: Account | None = None) -> None:
    """Create a directory with exactly this mode, whatever the umask, owned by the account if one is given."""
    directory.mkdir()
    directory.chmod(mode)
    if account is not None:
        os.chown(directory, account.uid, account.gid)


def make_data_dir(directory: Path) -> Path:
    """Create a data directory if necessary, and return its absolute path.

    One that root creates can be traversed by others, because its Postgres runs as another user, but not listed.
    """
    directory = directory.expanduser().absolute()
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        make_directory(directory, 0o711 if os.geteuid() == 0 else 0o700)
    return directory


def write_private(path: Path, text: str, account: Account | None = None) -> None:
    """Atomically write the text to a file that only its owner can read, replacing an earlier file."""
    with open_replacement(path, is_private=True, follows_links=False) as file:
        if account is not None:
            os.fchown(file.fileno(), account.uid, account.gid)
        file.write(text.encode())
