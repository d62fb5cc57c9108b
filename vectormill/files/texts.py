"""Texts: whichever kind of input is named, as a stream of items. Knows nothing of jobs.

read_texts("papers.jsonl.gz")       JSONL, plain or .gz (also .ndjson)
read_texts("papers.csv")            CSV or TSV with a header, plain or .gz
read_texts("papers.parquet")        Parquet, one row group after another
read_texts("papers/")               every text file below the directory
read_texts("-")                     JSONL on standard input
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Final

from vectormill.domain.errors import InvalidItem
from vectormill.files.formats import INPUT_FORMATS, INPUT_HELP, by_suffix
from vectormill.files.lines import JsonlFile, JsonLines
from vectormill.files.ndjson import ItemJson
from vectormill.files.rows import Fields
from vectormill.files.tables import CsvFile, ParquetFile
from vectormill.files.trees import TextTree

READERS: Final[Mapping[str, Callable[[Path, Fields], Iterable[ItemJson]]]] = {
    "jsonl": JsonlFile,
    "csv": CsvFile,
    "tsv": partial(CsvFile, delimiter="\t"),
    "parquet": ParquetFile,
}
FORMAT_OF_SUFFIX: Final = by_suffix(INPUT_FORMATS)
# Items that are looked at before anything is started.
LOOKED_AT = 1000


def read_texts(name: str, fields: Fields | None = None) -> Iterable[ItemJson]:
    """Return the items of an input, read while they are iterated over.

    All but standard input can be iterated over again. Raise InvalidItem for an input of no known kind or that is
    not there, and while iterating, with file and line, for what cannot be read.
    """
    fields = fields or Fields()
    if name == "-":
        return iter(JsonLines(sys.stdin.buffer, "standard input", fields))
    path = Path(name)
    if path.is_dir():
        return TextTree(path, fields.errors)
    if not path.exists():
        raise InvalidItem(f"There is no file {name}.")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])
    format = FORMAT_OF_SUFFIX.get(kind)
    if format is None:
        raise InvalidItem(f"{name} has no known format. Supported inputs: {INPUT_HELP}")
    return READERS[format](path, fields)


def look_at_texts(items: Iterable[ItemJson], *, whole: bool) -> Iterable[ItemJson]:
    """Return the same items after reading the first thousand, or all of them, so that errors show before anything
    starts.

    Standard input is not read as a whole, as it can be read only once. Raise InvalidItem.
    """
    if not isinstance(items, Iterator):
        for _ in islice(iter(items), None if whole else LOOKED_AT):
            pass
        return items
    return chain(list(islice(items, LOOKED_AT)), items)
