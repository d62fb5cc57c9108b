"""Source: where a collection's texts come from.

Each kind of source is a class with its options, which commands, the API and the docs derive. Commands load this module
for their help, so it loads no library: requests are read by parsing.py. `open_source` (opening.py) returns the reader
of a source.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from vectormill.domain.errors import InvalidOption
from vectormill.domain.options import Help, Option, list_options
from vectormill.files.formats import InputName

if TYPE_CHECKING:
    from vectormill.rows.columns import Columns

SQL: Final = "sql"  # a query on any database that SQLAlchemy supports
FILES: Final = "files"  # JSONL, CSV and Parquet files, by name or glob
TREE: Final = "tree"  # text and Markdown files below a folder
PUSH: Final = "push"  # rows that a client streams
OWN_TEXTS: Final = "own_texts"  # texts that the collection itself keeps

# Protocols of files on the reading machine itself.
LOCAL: Final = ("file", "local")

# How often a source that names a column of changes is read as a whole, in hours.
FULL_EVERY_HOURS: Final = 7 * 24

# The default name of the key column.
KEY_COLUMN: Final = "key"


def name(
    text: str,
    metavar: str = "COLUMN",
    *,
    least: int | None = None,
    flag: str | None = None,
    are_names: bool = False,
) -> Help:
    """Return the help of an option that is a name, or a list of names, of at most 1,024 characters."""
    return Help(text, metavar=metavar, least=least, most=1024, flag=flag, are_names=are_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base class of the options of one kind of source, which are checked before anything is read."""

    kind: ClassVar[str]
    # The help of the flag that asks for a kind without options.
    help: ClassVar[str] = ""
    # How the error message goes on if a collection needs pairs and the source names no second texts; None if
    # rows may be pairs anyway.
    how_to_pair: ClassVar[str | None] = None
    # True if documents of this kind of source may be split into passages.
    can_be_split: ClassVar[bool] = True

    @classmethod
    def leading(cls) -> Option:
        """Return the option that a source of this kind must have, by which commands tell it; or else its switch."""
        required = (option for option in list_options(cls) if option.default is MISSING)
        return next(required, Option(cls.kind, bool, Help(cls.help), False))

    def check(self) -> None:
        """Raise InvalidOption if options exclude each other or contain something that must not be stored."""

    def local_files(self) -> Iterable[str]:
        """Return the files, patterns and folders of the machine that reads the source."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions(Options):
    """Options that name the columns of a source of rows."""

    how_to_pair = "; set text_pair to the column of the second ones"

    key: Annotated[str, name("The column with the key.")] = KEY_COLUMN
    text: Annotated[str, name("The column with the text.")] = "text"
    text_pair: Annotated[str | None, name("The column with the second text of a pair.")] = None
    metadata: Annotated[tuple[str, ...], name("A column to keep as metadata.", are_names=True)] = ()
    metadata_json: Annotated[
        str | None, name("The column with the metadata as JSON objects, instead of --metadata.")
    ] = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the names of the columns that hold texts."""
        return (self.text, self.text_pair) if self.text_pair else (self.text,)

    @property
    def item_columns(self) -> "Columns":
        """Return the columns that make an item."""
        from vectormill.rows.columns import Columns  # late, because commands need it only to run

        return Columns(self.text, self.key, self.text_pair, self.metadata, self.metadata_json)

    def check(self) -> None:
        if self.metadata and self.metadata_json:
            raise InvalidOption(
                "Set metadata (columns) or metadata_json (one column of JSON objects), not both."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlOptions(ColumnOptions):
    """Options of a SQL query. Without `url_env` and `url_file` it runs on Vectormill's own Postgres."""

    kind = SQL

    query: Annotated[str, Help("Read the rows of a query.", flag="--sql", metavar="QUERY", most=100_000)]
    pages: Annotated[
        bool,
        Help(
            "Read the query in the order of its key, a page in each transaction; for large tables of Postgres with an "
            "index by that column."
        ),
    ] = False
    changed: Annotated[
        str | None,
        name(
            "The column that grows with each change of a row, such as updated_at: read only rows that changed, and now "
            "and then all of them."
        ),
    ] = None
    full_every_hours: Annotated[
        int,
        Help(
            "With --changed, how often all rows are read, which finds vanished ones.",
            metavar="N",
            least=1,
            most=8784,
        ),
    ] = FULL_EVERY_HOURS
    url_env: Annotated[
        str | None,
        Help(
            "The environment variable with the database's URL, in the processes that read the source.",
            metavar="VARIABLE", pattern="^[A-Za-z_][A-Za-z0-9_]*$", most=256,
        ),
    ] = None  # fmt: skip
    url_file: Annotated[
        str | None,
        name(
            "The file with the database's URL, for the same processes. Without either, the service's own database is "
            "read.",
            "FILE",
        ),
    ] = None

    def check(self) -> None:
        ColumnOptions.check(self)
        if self.url_env and self.url_file:
            raise InvalidOption("Set url_env or url_file, not both: each says where the database's URL is.")

    def local_files(self) -> Iterable[str]:
        return (self.url_file,) if self.url_file else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(ColumnOptions):
    """Options of files, by path, URL or glob. `format` is inferred from the file names unless it is given."""

    kind = FILES

    files: Annotated[
        tuple[str, ...], name("Read JSONL, CSV or Parquet: a path, glob or URL.", "GLOB", least=1)
    ]
    format: Annotated[InputName | None, Help("By default, the files' extensions.")] = None

    def check(self) -> None:
        ColumnOptions.check(self)
        for file in self.files:
            host = file.partition("://")[2].partition("/")[0]
            if "@" in host and ":" in host.rpartition("@")[0]:
                raise InvalidOption(
                    "A password in a file's URL would be stored and shown. Configure it in the process that reads the "
                    "files instead, as its store expects (for S3: AWS_SECRET_ACCESS_KEY, a profile or a role)."
                )

    def local_files(self) -> Iterable[str]:
        for file in self.files:
            protocol, mark, path = file.rpartition("://")
            if not mark or protocol in LOCAL:
                yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions(Options):
    """Options of a folder and the patterns of its files.

    In a pattern `**` matches any number of folders; a pattern without a slash matches file names in every
    folder.
    """

    kind = TREE
    how_to_pair = ", but a tree has one per file; use a source with text_pair"

    folder: Annotated[str, name("Read the text and Markdown files below a folder.", "FOLDER", flag="--tree")]
    include: Annotated[
        tuple[str, ...], name("Read only files of the tree that match this pattern.", "PATTERN")
    ] = ("*.md", "*.markdown", "*.txt", "*.rst")
    exclude: Annotated[tuple[str, ...], name("Skip files that match this pattern.", "PATTERN")] = ()

    def local_files(self) -> Iterable[str]:
        return (self.folder,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions(Options):
    """Options of a push; there are none, as the client sends the rows."""

    kind = PUSH
    help = "Take the rows that `vectormill push COLLECTION FILE` sends."


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTextOptions(Options):
    """Options of the collection's own texts; there are none. Kept texts are passages already if split."""

    kind = OWN_TEXTS
    help = "Take the texts that the collection keeps itself."
    can_be_split = False


KINDS: Final[Mapping[str, type[Options]]] = {
    each.kind: each for each in (SqlOptions, FileOptions, TreeOptions, PushOptions, OwnTextOptions)
}
SOURCE_KINDS: Final = tuple(KINDS)


@dataclass(frozen=True, slots=True)
class Source:
    """A source of a collection: its kind, its options, and how documents are split ({} if they are not).

    `options` and `split` are stored and shown, so they never contain secrets, only the names of environment
    variables or files that do.
    """

    kind: str
    options: Mapping[str, Any]
    split: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key_column(self) -> str:
        """Return the name of the key column of a source that has columns."""
        return str(self.options.get("key", KEY_COLUMN))

    @property
    def is_own_query(self) -> bool:
        """Return True for a query on Vectormill's own Postgres, where triggers can follow a table."""
        return self.kind == SQL and not self.options.get("url_env") and not self.options.get("url_file")


@dataclass(frozen=True, slots=True)
class SavedSource:
    """A source as it is saved for a collection."""

    collection: str
    source: Source
    created_at: datetime
    updated_at: datetime
