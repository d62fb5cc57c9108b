"""Trees: a directory of text files as items, one a file."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vectormill.domain.errors import InvalidItem
from vectormill.files.ndjson import ItemJson
from vectormill.files.rows import FAIL_ALONE, REFUSE, UnicodeErrors


@dataclass(frozen=True, slots=True)
class TextTree:
    """Every file below a directory, in sorted order; the key is the path from the directory, with slashes.

    Hidden files and folders (their names start with a dot) are passed over. `errors` is what becomes of a file that is
    not UTF-8: see UnicodeErrors.
    """

    root: Path
    errors: UnicodeErrors = FAIL_ALONE

    def __iter__(self) -> Iterator[ItemJson]:
        num_files = 0
        for path in self.find_files():
            num_files += 1
            yield self.read(path)
        if num_files == 0:
            raise InvalidItem(f"{self.root} holds no files.")

    def find_files(self, on_error: Callable[[OSError], object] | None = None) -> Iterator[Path]:
        """Yield the files in order. `on_error` gets the error of a folder that cannot be read, which is skipped
        otherwise.
        """
        for folder, folders, files in os.walk(self.root, onerror=on_error):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith("."):
                    yield Path(folder, name)

    def read(self, path: Path, max_bytes: int = -1) -> ItemJson:
        """Return the item of one file, or of so many bytes of it."""
        with path.open("rb") as file:
            content = file.read(max_bytes)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if self.errors == REFUSE:
                raise InvalidItem(
                    f"{path} is not UTF-8 text (byte {error.start}). Convert it, or move it out of {self.root}."
                ) from error
            # To the first bad byte and no further: a film among the texts need not travel.
            text = content[: error.start + 1].decode("utf-8", FAIL_ALONE)
        return {"key": path.relative_to(self.root).as_posix(), "text": text}
