"""Source: where the texts of a collection come from."""

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
    """Of one collection. `options` are those of its kind; `split` says how a document becomes rows, {} for not at all.

    Both are what is stored and shown; secrets are never in them, only the names of what holds them.
    """

    kind: str
    options: Mapping[str, Any]
    split: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key_column(self) -> str:
        """Of a source of rows: what it was told, which need not be all that it means."""
        return str(self.options.get("key", KEY_COLUMN))


@dataclass(frozen=True, slots=True)
class SavedSource:
    """The source of a collection as it is kept."""

    collection: str
    source: Source
    created_at: datetime
    updated_at: datetime
