"""Lines of JSON as items: files, plain or compressed, and standard input."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from vectormill.domain.errors import InvalidItem
from vectormill.files.ndjson import ItemJson
from vectormill.files.rows import Fields, make_item


def open_bytes(path: Path) -> BinaryIO:
    """Return the file's bytes, unpacked when its name ends in .gz."""
    return cast("BinaryIO", gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


@dataclass(frozen=True, slots=True)
class JsonlFile:
    """A .jsonl or .jsonl.gz file; each iteration reads it anew."""

    path: Path
    fields: Fields

    def __iter__(self) -> Iterator[ItemJson]:
        with open_bytes(self.path) as file:
            try:
                yield from JsonLines(file, str(self.path), self.fields)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise InvalidItem(f"{self.path} is not a whole gzip file: {error}.") from error


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Lines of JSON objects from anything that yields lines of bytes. Blank lines are passed over."""

    lines: Iterable[bytes]
    name: str
    fields: Fields

    def __iter__(self) -> Iterator[ItemJson]:
        for number, line in enumerate(self.lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # Windows programs like to write a byte order mark
            if line.strip():
                yield self._read(line, number)

    def _read(self, line: bytes, number: int) -> ItemJson:
        place = f"{self.name}, line {number}"
        try:
            row = json.loads(line.decode("utf-8", self.fields.errors))
        except UnicodeDecodeError as error:
            raise InvalidItem(f"{place}: it is not UTF-8 (byte {error.start + 1} of the line).") from error
        except json.JSONDecodeError as error:
            raise InvalidItem(f"{place}: it is not JSON ({error.msg}, column {error.colno}).") from error
        except RecursionError as error:
            raise InvalidItem(f"{place}: its JSON is nested too deeply.") from error
        if not isinstance(row, dict):
            raise InvalidItem(f'{place}: expected a JSON object such as {{"key": …, "text": …}}.')
        return make_item(row, self.fields, number, place)
