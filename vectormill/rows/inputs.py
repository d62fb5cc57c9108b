"""Inputs of a client: files, folders and standard input as a stream of items, as the API takes them.

read_texts("papers.jsonl.gz")       JSONL, plain or compressed (also .ndjson)
read_texts("papers.csv")            CSV or TSV with a header, plain or compressed
read_texts("papers.parquet")        Parquet, one batch of rows after another
read_texts("papers/")               every text file below the directory
read_texts("-")                     JSONL on standard input"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from vectormill.domain.errors import InvalidItem
from vectormill.files.formats import INPUT_FORMATS, INPUT_HELP, PACKED, by_suffix
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.item import Item, split_pair
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import JSONL, PARQUET, UNLIMITED, read_rows, strip_mark
from vectormill.rows.items import Assembler

FORMAT_OF_SUFFIX: Final = by_suffix(INPUT_FORMATS)
# The number of items that are checked before a job is started.
LOOKED_AT: Final = 1000


@dataclass(frozen=True, slots=True)
class RowReading:
    """How rows are read: their columns, and what becomes of faults.

    `advice` ends the error of a row without such a field: how others are chosen. A byte that is not UTF-8 makes its
    item fail, or with `is_strict` is refused. A longer line than `max_line_bytes` is refused before it is read whole,
    and a file that expands to more than `max_ratio` times its size.
    """

    columns: Columns = field(default_factory=Columns)
    is_strict: bool = False
    advice: str = "Choose others with --text-field and --key-field."
    max_line_bytes: int = UNLIMITED
    max_ratio: int = UNLIMITED

    def choose(self, present: Sequence[str], place: str) -> Columns:
        return self.columns.guess(present, place, self.advice)


def to_json(item: Item) -> ItemJson:
    """Return an item as the API takes it."""
    text, pair = split_pair(item.text)
    body: ItemJson = {"key": item.key, "text": decode_text(text)}
    if pair is not None:
        body["text_pair"] = decode_text(pair)
    if item.metadata:
        body["metadata"] = msgspec.Raw(item.metadata)
    return body


def decode_text(text: bytes) -> str:
    """Return a text of an item; bytes that are not UTF-8 become lone surrogates."""
    try:
        return text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return text.decode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class FileItems:
    """The items of a file, or of standard input if `path` is None; each iteration reads a file again."""

    path: Path | None
    format: str
    reading: RowReading

    def __iter__(self) -> Iterator[ItemJson]:
        if self.path is None:
            yield from self._read(sys.stdin.buffer, "standard input")
            return
        with self.path.open("rb") as file:
            yield from self._read(file, str(self.path))

    def _read(self, file: BinaryIO, name: str) -> Iterator[ItemJson]:
        assembler = Assembler(name, UNLIMITED)
        assembler.noun = "row" if self.format == PARQUET else "line"
        reading = self.reading
        bounds = (reading.max_line_bytes, reading.max_ratio)
        for batch in read_rows(file, self.format, reading.choose, name, *bounds):
            for item, number in zip(assembler.assemble_batch(batch), batch.numbers, strict=True):
                if reading.is_strict:
                    refuse_bytes(item.text, f"{name}, {assembler.noun} {number}")
                yield to_json(item)


def refuse_bytes(text: bytes, place: str) -> None:
    """Raise InvalidItem if a text, or a text of a pair, is not UTF-8."""
    for side in split_pair(text):
        try:
            (side or b"").decode()
        except UnicodeDecodeError as error:
            raise InvalidItem(f"{place}: not valid UTF-8 (byte {error.start + 1} of the text).") from error


@dataclass(frozen=True, slots=True)
class TextTree:
    """The items of all files below a directory, in sorted order. The key is the relative path, with slashes.

    Hidden files and folders (their names start with a dot) are skipped. A file that is not UTF-8 makes its item fail,
    or with `is_strict` is refused.
    """

    root: Path
    is_strict: bool = False

    def __iter__(self) -> Iterator[ItemJson]:
        num_files = 0
        for path in self.find_files():
            num_files += 1
            with path.open("rb") as file:
                yield self.read(path, file)
        if num_files == 0:
            raise InvalidItem(f"{self.root} contains no files.")

    def find_files(self, on_error: Callable[[OSError], object] | None = None) -> Iterator[Path]:
        """Yield the paths of the files in order. Unreadable folders are skipped, and `on_error` gets their errors."""
        for folder, folders, files in os.walk(self.root, onerror=on_error):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith("."):
                    yield Path(folder, name)

    def read(self, path: Path, file: BinaryIO, max_bytes: int = -1) -> ItemJson:
        """Return the item of one file, of at most its first `max_bytes` bytes (-1: all). Raise InvalidItem."""
        content = file.read(max_bytes)
        try:
            text = strip_mark(content, str(path)).decode()
        except (UnicodeDecodeError, InvalidItem) as error:
            start = error.start if isinstance(error, UnicodeDecodeError) else 1  # of UTF-16
            if self.is_strict:
                raise InvalidItem(
                    f"{path} is not UTF-8 text (byte {start}). Convert it, or move it out of {self.root}."
                ) from error
            # The text ends at the first bad byte, so that a video among the texts is not uploaded completely.
            text = content[: start + 1].decode("utf-8", "surrogateescape")
        return {"key": path.relative_to(self.root).as_posix(), "text": text}


def read_texts(name: str, reading: RowReading | None = None, format: str | None = None) -> Iterable[ItemJson]:
    """Return the items of an input, which are read lazily. `name` is a file, a directory, or - for standard input.

    By default the name of a file decides its format, and standard input is JSON Lines. All but standard input can be
    iterated over again. Raise InvalidItem if the input does not exist or has no known format; iteration raises it, with
    file and line, for an item that cannot be read.
    """
    reading = reading or RowReading()
    if name == "-":
        return iter(FileItems(None, format or JSONL, reading))
    path = Path(name)
    if path.is_dir():
        if format is not None or reading.columns.metadata:
            raise InvalidItem(
                f"{name} is a directory, and each of its files a text: leave out the format and columns of metadata."
            )
        return TextTree(path, reading.is_strict)
    if not path.exists():
        raise InvalidItem(f"There is no file {name}.")
    format = format or find_format(name)
    if format is None:
        raise InvalidItem(f"Unknown format of {name}. Supported inputs: {INPUT_HELP}")
    return FileItems(path, format, reading)


def find_format(name: str) -> str | None:
    """Return the format that the name of a file, compressed or not, ends in."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return FORMAT_OF_SUFFIX.get(suffixes[-1] if suffixes else "")


def look_at_texts(items: Iterable[ItemJson], *, whole: bool) -> Iterable[ItemJson]:
    """Read the first thousand items, or all if `whole`, to find errors before a job starts; return all items again.

    Of standard input only the first thousand are read, since it can be read only once. Raise InvalidItem.
    """
    if not isinstance(items, Iterator):
        for _ in islice(iter(items), None if whole else LOOKED_AT):
            pass
        return items
    return chain(list(islice(items, LOOKED_AT)), items)
