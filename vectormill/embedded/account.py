"""Account: the user that a server runs as, and where that user can reach its files. Knows nothing of the servers.

Postgres refuses to run as root. Started by root, it runs as an existing user without privileges, `postgres` or
`nobody`; no user is added. Its files must lie where that user can go. The mode of directories that are not ours is
never changed, so the files go to a place of ours when root's own directories are closed to others.
"""

import os
import pwd
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vectormill.embedded.errors import EmbeddedServerFailed

# /var/lib survives a reboot; the others serve systems where it is read-only.
OUR_PLACES = (Path("/var/lib/vectormill"), Path("/var/tmp/vectormill-root"))  # noqa: S108 - checked by _is_ours


@dataclass(frozen=True, slots=True)
class Account:
    """A user that is not root, and its group."""

    name: str
    uid: int
    gid: int

    def can_enter(self, directory: Path) -> bool:
        """Return whether the user may traverse the directory and all above it, by their mode bits.

        An access control list may allow more or less; then Postgres's own message tells.
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
    """Return the user that Postgres runs as when we are root; None when we are not, and it runs as ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "_postgres", "nobody"):  # the second is macOS's own
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid > 0:  # macOS writes nobody as -2
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedServerFailed(
        "Postgres refuses to run as root, and there is no user postgres or nobody to run it as; "
        "add one, or run vectormill as an ordinary user"
    )


def owner_of(directory: Path) -> Account | None:
    """Return the user that owns the directory, if it is another than ourselves."""
    status = directory.stat()
    if status.st_uid == os.geteuid():
        return None
    try:
        entry = pwd.getpwuid(status.st_uid)
    except KeyError:
        return Account(f"uid {status.st_uid}", status.st_uid, status.st_gid)
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def place_of_ours(account: Account) -> Path:
    """Return a directory owned by root where the account can go, for what it cannot reach elsewhere."""
    for place in (*OUR_PLACES, Path(tempfile.gettempdir()) / "vectormill-root"):
        try:
            if not place.is_dir():
                make_directory(place, 0o755)
        except OSError:
            continue  # no such parent, or a read-only file system: the next
        if _is_ours(place) and account.can_enter(place):
            return place
    raise EmbeddedServerFailed(
        f"Postgres runs as user {account.name} because root may not run it, and there is no place for its files that "
        f"{account.name} can reach: tried {', '.join(map(str, OUR_PLACES))} and the temporary directory"
    )


def _is_ours(directory: Path) -> bool:
    """Return whether only root can have put something there: /tmp is open to all, and its names can be guessed."""
    status = directory.lstat()
    open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not open_to_others


def make_directory(directory: Path, mode: int, account: Account | None = None) -> None:
    """Make a directory with exactly this mode, whatever the umask, owned by the account if there is one."""
    directory.mkdir()
    directory.chmod(mode)
    if account is not None:
        os.chown(directory, account.uid, account.gid)


def write_private(path: Path, text: str, account: Account | None = None) -> None:
    """Put the text into a file that only its owner can read, all of it or none, replacing an earlier one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if account is not None:
            os.fchown(descriptor, account.uid, account.gid)
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    draft.rename(path)
