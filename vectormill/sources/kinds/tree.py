"""Tree: text and Markdown files below a folder, one document a file. The key is the path from the folder."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from fsspec.utils import glob_translate

from vectormill.domain.errors import SourceFailed
from vectormill.files.trees import TextTree
from vectormill.jobs.item import Item
from vectormill.sources.options import TreeOptions
from vectormill.sources.places import check_local
from vectormill.sources.reader import MOST_BYTES, Complaints, SourcePlace
from vectormill.sources.rows import Assembler

# Few, as a file may be long; and whoever waits for the first batch waits for so many files.
BATCH_FILES: Final = 512


class TreeReader:
    """Reads files in the order of their paths, hidden ones left out. Of a longer file MOST_BYTES are read.

    No time of change is among the metadata: a copy of the folder would be another, and every row changed.
    """

    def __init__(self, options: TreeOptions, place: SourcePlace) -> None:
        self._options = options
        self._place = place
        self.complaints = Complaints()

    def read(self) -> Iterator[list[Item]]:
        """Raises SourceFailed also when no file fits: a folder that is not mounted is no empty source."""
        tree = TextTree(self._find_folder())
        assembler = Assembler(str(tree.root), self._place.settings.max_key_bytes, self.complaints)
        keys: list[str] = []
        texts: list[str] = []
        num_bytes = num_files = 0
        for path in self._find_files(tree):
            try:
                document = tree.read(check_local(path, self._place.settings.source_root), MOST_BYTES)
            except FileNotFoundError:  # removed since the folder was read, and no document any more
                continue
            except OSError as error:
                raise SourceFailed(f"{path} cannot be read: {error.strerror}.") from error
            num_files += 1
            keys.append(path.relative_to(tree.root).as_posix())
            texts.append(document["text"])
            num_bytes += len(document["text"])
            if len(keys) >= BATCH_FILES or num_bytes >= MOST_BYTES:
                yield assembler.assemble(keys, texts, [{"path": key} for key in keys])
                keys, texts, num_bytes = [], [], 0
        if keys:
            yield assembler.assemble(keys, texts, [{"path": key} for key in keys])
        if num_files == 0:
            raise SourceFailed(
                f"{tree.root} holds no file that fits ({', '.join(self._options.include)}); is it mounted where the "
                "source is read?"
            )

    def count_rows(self) -> int | None:
        return None

    def _find_folder(self) -> Path:
        folder = check_local(Path(self._options.folder), self._place.settings.source_root)
        if not folder.is_dir():
            raise SourceFailed(f"There is no folder {folder} where the source is read.")
        return folder

    def _find_files(self, tree: TextTree) -> Iterator[Path]:
        is_included, is_excluded = make_filter(self._options.include), make_filter(self._options.exclude)

        def fail(error: OSError) -> None:
            raise SourceFailed(f"{error.filename} cannot be read: {error.strerror}.") from error

        for path in tree.find_files(fail):
            name = os.fspath(path.relative_to(tree.root)).replace(os.sep, "/")
            # A pipe would be waited for, and a device has no end.
            if is_included(name) and not is_excluded(name) and path.is_file():
                yield path


def make_filter(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return whether a path relative to the folder matches one of the patterns."""
    translated = [glob_translate(pattern if "/" in pattern else f"**/{pattern}") for pattern in patterns]
    fits = [re.compile(pattern) for pattern in translated]
    return lambda name: any(pattern.match(name) for pattern in fits)
