"""Roots: the folders beneath which requests may name files of the server's machine, and the way to open those.

The links of a path are resolved, and then the file is opened folder by folder from its root, without following links.
So what is opened is what was looked at: a link that is put into its place meanwhile makes the opening fail.
"""

import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Self

from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.settings import PREFIX, Folders, Settings, describe_data_dir

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Enough to open something in a folder, even in one that may not be listed. macOS has no such flag.
THROUGH: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe is opened without waiting for whoever writes to it, since only then it is known to be one.
AT_END: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WILD: Final = "*?["


@dataclass(frozen=True, slots=True)
class Roots:
    """Folders without links, the setting that names them, the data directory, and the error for other files.

    Nothing in the data directory may be named, unless a root lies in it: it holds the keys of the installation.
    """

    folders: Folders = ()
    setting: str = ""
    data_dir: Path | None = None
    refusal: type[VectormillError] = InvalidOption

    @classmethod
    def of(cls, settings: Settings, name: str, refusal: type[VectormillError] = InvalidOption) -> Self:
        """Return the folders of the setting `name`."""
        folders = tuple(map(resolve, getattr(settings, name)))
        return cls(folders, PREFIX + name.upper(), resolve(settings.data_dir), refusal)

    def find(self, path: Path) -> tuple[Path, Path]:
        """Return the root above a file, and its path without links. A relative path begins at the first root.

        Raise `refusal` for a file that is beneath no root.
        """
        if not self.folders:
            raise self.refusal(
                f"{path} is on the server's machine, whose files requests may name only below a folder: set "
                f"{self.setting} to it for `vectormill up`, or for API, indexer and workers, and restart them; or use "
                "an object store such as s3://."
            )
        real = resolve(self.folders[0] / path)
        for root in filter(real.is_relative_to, self.folders):
            if not self.is_private(real) or self.is_private(root):
                return root, real
        wanted = self.folders[0] / path
        while wanted.suffix or any(set(WILD) & set(part) for part in wanted.parts):
            wanted = wanted.parent
        more = shlex.quote(os.pathsep.join(map(str, (*self.folders, wanted))))
        raise self.refusal(
            f"{path} is not below {' or '.join(map(str, self.folders))} ({self.setting}), or in the data directory. To "
            f"allow its folder too, restart with `{self.setting}={more} vectormill up"
            f"{describe_data_dir(self.data_dir)}`, or set the variable for API, indexer and workers."
        )

    def is_private(self, path: Path) -> bool:
        """Return whether a path without links is in the data directory."""
        return self.data_dir is not None and path.is_relative_to(self.data_dir)

    @contextmanager
    def opened(
        self, path: Path, flags: int = os.O_DIRECTORY, *, makes_folders: bool = False
    ) -> Iterator[int]:
        """Yield the descriptor of a folder, or with other `flags` of a file. Raise `refusal` and OSError."""
        root, real = self.find(path)
        *above, last = real.relative_to(root).parts or (".",)
        if makes_folders:
            root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, THROUGH)
        try:
            for part, part_flags in (*((each, THROUGH) for each in above), (last, flags | AT_END)):
                if makes_folders:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                folder, descriptor = descriptor, os.open(part, part_flags, dir_fd=descriptor)
                os.close(folder)
            yield descriptor
        finally:
            os.close(descriptor)

    def open_file(self, path: Path) -> BinaryIO:
        """Open a regular file for reading. Raise `refusal`, also for anything else, and OSError."""
        with self.opened(path, os.O_RDONLY) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise self.refusal(
                    f"{path} is not a regular file: a pipe would block for ever, and a device has no end."
                )
            return os.fdopen(os.dup(descriptor), "rb")

    def write(self, path: Path, content: "Buffer", *, only_new: bool) -> bool:
        """Write a file at once, and the folders above it. Raise `refusal` and OSError.

        With `only_new` return False if there is something of this name already.
        """
        with self.opened(path.parent, makes_folders=True) as folder:
            draft = f"{path.name}#{secrets.randbits(62)}"  # no list of obstore has a name that ends so
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                publish = os.link if only_new else os.replace
                publish(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                return False
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=folder)
        return True

    def delete(self, path: Path) -> None:
        """Delete a file. Raise `refusal` and OSError."""
        with self.opened(path.parent) as folder:
            os.unlink(path.name, dir_fd=folder)


def resolve(path: Path) -> Path:
    """Return the whole path without links; what is not there is kept as it is."""
    return Path(os.path.realpath(path.expanduser()))


# What a user's own command reads, with the rights of that user.
ANYWHERE: Final = Roots((Path("/"),))
NOWHERE: Final = Roots()
