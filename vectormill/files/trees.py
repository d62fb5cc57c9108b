"""Trees: a directory of text files as items, one a file."""

import os
from collections.abc import Iterator
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
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith("."):
                    num_files += 1
                    yield self._read(Path(folder, name))
        if num_files == 0:
            raise InvalidItem(f"{self.root} holds no files.")

    def _read(self, path: Path) -> ItemJson:
        content = path.read_bytes()
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
