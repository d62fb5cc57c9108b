"""Workplace: the data directory of one command, given or temporary. Knows nothing of what the servers keep in it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vectormill.embedded.account import make_directory
from vectormill.embedded.cluster import remove_cluster


def make_data_dir(directory: Path) -> Path:
    """The directory, made if need be. Root's can be passed through: its Postgres runs as another user."""
    directory = directory.expanduser().absolute()
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        make_directory(directory, 0o711 if os.geteuid() == 0 else 0o700)
    return directory


@contextmanager
def workplace(data_dir: Path | None, keep: bool = False) -> Iterator[Path]:
    """The directory that was given, or a temporary one that is removed at the end unless it shall be kept."""
    if data_dir is not None:
        yield make_data_dir(data_dir)
        return
    directory = Path(tempfile.mkdtemp(prefix="vectormill-"))
    if os.geteuid() == 0:
        directory.chmod(0o711)
    try:
        yield directory
    finally:
        if not keep:
            remove_cluster(directory)  # it may lie elsewhere
            shutil.rmtree(directory, ignore_errors=True)
