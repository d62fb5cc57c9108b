"""Source: where the texts of a collection come from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

SQL: Final = "sql"  # a query on any database that SQLAlchemy reaches
FILES: Final = "files"  # JSONL, CSV and Parquet, by name or glob
TREE: Final = "tree"  # text and Markdown files below a folder
PUSH: Final = "push"  # what a client streams
OWN_TEXTS: Final = "own_texts"  # those that the collection itself keeps

SOURCE_KINDS: Final = (SQL, FILES, TREE, PUSH, OWN_TEXTS)

# The column of a source's keys where it names none.
KEY_COLUMN: Final = "key"


@dataclass(frozen=True, slots=True)
class Source:
    """A source of a collection: `options` of its kind; `split` says how a document becomes rows, {} for not at all.

    Both are what is stored and shown; secrets are never in them, only the names of what holds them.
    """

    kind: str
    options: Mapping[str, Any]
    split: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key_column(self) -> str:
        """Return the column of keys of a source of rows."""
        return str(self.options.get("key", KEY_COLUMN))


@dataclass(frozen=True, slots=True)
class SavedSource:
    """The source of a collection as it is kept."""

    collection: str
    source: Source
    created_at: datetime
    updated_at: datetime


# Parts of a URL: a presigned address or a shared-access signature opens what it names to whoever reads it. A "?" of a
# glob has no "=" behind it.
QUERY_OF_URL: Final = re.compile(r"(?<=\?)[^\s?'\"]*=[^\s'\"]*")


def hide_queries(text: str) -> str:
    """Replace the query strings of URLs in a text by an ellipsis."""
    return QUERY_OF_URL.sub("…", text) if "://" in text else text


def hide_files(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without the query strings of file URLs: whoever has a key of scope read sees them."""
    files = options.get("files")
    hidden = {"files": [hide_queries(str(name)) for name in files]} if files else {}
    return {**options, **hidden}
