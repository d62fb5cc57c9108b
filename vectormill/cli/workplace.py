"""Workplace: the data directory of one command, given or temporary. Knows nothing of what lies in it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def workplace(data_dir: Path | None, keep: bool = False) -> Iterator[Path]:
    """The directory that was given, made if need be, or a temporary one that is removed at the end unless kept."""
    if data_dir is not None:
        directory = data_dir.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield directory
        return
    directory = Path(tempfile.mkdtemp(prefix="vectormill-"))
    if os.geteuid() == 0:
        # Root's Postgres runs as another user, who must be able to pass through here; listing stays forbidden.
        directory.chmod(0o711)
    try:
        yield directory
    finally:
        if not keep:
            remove(directory)


def remove(directory: Path) -> None:
    """Removes a directory of ours, and the Postgres cluster that it links to.

    Where Postgres cannot reach a directory of root's, its cluster lies elsewhere (vectormill.embedded.cluster).
    """
    link = directory / "postgres"
    if link.is_symlink() and link.resolve().parent.name == "clusters":
        shutil.rmtree(link.resolve(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
