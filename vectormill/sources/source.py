"""Source: where the texts of a collection come from, the options of each kind, and what its collection can read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import JUDGE, TASKS
from vectormill.files.formats import InputName

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


Named = Annotated[str, Meta(min_length=1, max_length=1024)]
Names = Annotated[tuple[Named, ...], Meta(max_length=256)]


NONE: Final = "none"
PARAGRAPHS: Final = "paragraphs"
TOKENS: Final = "tokens"
SPLITS: Final = (NONE, PARAGRAPHS, TOKENS)


class SqlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query and its columns. Without `url_env` and `url_file` it is asked of our own Postgres.

    `text_pair` is the column of a second text, where items are pairs. `metadata` names columns; one alone that holds
    JSON objects is named by `metadata_json` instead.
    """

    query: Annotated[str, Meta(min_length=1, max_length=100_000)]
    key: Named = KEY_COLUMN
    text: Named = "text"
    text_pair: Named | None = None
    metadata: Names = ()
    metadata_json: Named | None = None
    url_env: Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)] | None = None
    url_file: Named | None = None


class FileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files by path, URL or glob; `format` is told by their names unless it is given."""

    files: Annotated[Names, Meta(min_length=1)]
    key: Named = KEY_COLUMN
    text: Named = "text"
    text_pair: Named | None = None
    metadata: Names = ()
    metadata_json: Named | None = None
    format: InputName | None = None


class TreeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A folder and which of its files: `**` spans folders; a pattern without a slash fits a name in any of them."""

    folder: Named
    include: Names = ("*.md", "*.markdown", "*.txt", "*.rst")
    exclude: Names = ()


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of kinds that have none."""


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for splitting a document into passages.

    `paragraphs`: whole paragraphs of `min_chars` to `max_chars` characters; a longer one is cut between sentences.
    `tokens`: as much as fits `tokens` of the model's own, of which `overlap` are shared with the passage before.
    """

    by: Literal["none", "paragraphs", "tokens"] = "none"
    tokens: Annotated[int, Meta(ge=8, le=1_000_000)] = 256
    overlap: Annotated[int, Meta(ge=0)] = 0
    min_chars: Annotated[int, Meta(ge=1)] = 200
    max_chars: Annotated[int, Meta(ge=16, le=1_000_000)] = 1500
    markdown: bool | None = None


Options = SqlOptions | FileOptions | TreeOptions | NoOptions

OPTIONS_OF_KIND: Final[Mapping[str, type[Options]]] = {
    SQL: SqlOptions,
    FILES: FileOptions,
    TREE: TreeOptions,
    PUSH: NoOptions,
    OWN_TEXTS: NoOptions,
}


def parse_options(source: Source) -> Options:
    """The options of the source's kind. Raises InvalidOption naming the field that does not fit."""
    if source.kind not in OPTIONS_OF_KIND:
        raise InvalidOption(f"{source.kind!r} is no kind of source; there are {', '.join(OPTIONS_OF_KIND)}.")
    options: Options = _convert(
        source.options, OPTIONS_OF_KIND[source.kind], f"A source of kind {source.kind}"
    )
    if isinstance(options, SqlOptions | FileOptions) and options.metadata and options.metadata_json:
        raise InvalidOption(
            "Give metadata (columns) or metadata_json (one column of JSON objects), not both."
        )
    if isinstance(options, SqlOptions) and options.url_env and options.url_file:
        raise InvalidOption("Give url_env or url_file, not both: each names where the database's URL is.")
    if isinstance(options, FileOptions):
        for name in options.files:
            _refuse_credentials(name)
    return options


def parse_split(source: Source) -> Split:
    """Return how the source's documents are split into rows. Raises InvalidOption."""
    split: Split = _convert(source.split, Split, "The split")
    if split.by != NONE and source.options.get("text_pair") is not None:
        raise InvalidOption("A pair is judged whole: leave out the split, or text_pair.")
    if split.by == TOKENS and split.overlap * 2 >= split.tokens:
        raise InvalidOption(
            f"The overlap of passages must be less than half of their tokens, from 0 to {(split.tokens - 1) // 2}, "
            f"not {split.overlap}."
        )
    if split.by == PARAGRAPHS and split.min_chars > split.max_chars:
        raise InvalidOption(f"min_chars ({split.min_chars}) must not be above max_chars ({split.max_chars}).")
    return split


def _convert(values: Mapping[str, Any], kind: type[Any], subject: str) -> Any:
    try:
        return msgspec.convert(dict(values), kind)
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, path = str(error).partition(" - at `")
        field = path.removesuffix("`").removeprefix("$").removeprefix(".")
        raise InvalidOption(f"{subject}{f', {field}' if field else ''}: {reason}.") from None


def _refuse_credentials(name: str) -> None:
    host = name.partition("://")[2].partition("/")[0]
    if "@" in host and ":" in host.rpartition("@")[0]:
        raise InvalidOption(
            "A password in a file's URL would be kept and shown. Give it to the process that reads the files instead, "
            "in the way of its store (for S3 AWS_SECRET_ACCESS_KEY, a profile or a role)."
        )


WITH_COLUMNS = (SQL, FILES)


def refuse_unfit(source: Source, spec: EncodingSpec | None) -> None:
    """Raises InvalidOption, naming `text_pair`. Of a collection that is not there yet nothing is known."""
    if spec is None:
        return
    pair = source.options.get("text_pair")
    if pair is not None and not TASKS[spec.task].reads_pairs:
        raise InvalidOption(
            f"The source names {pair!r} for second texts (text_pair), and the collection's task, {spec.task}, reads "
            "one text a row: leave out text_pair."
        )
    if not needs_pairs(spec):
        return
    if source.kind == TREE:
        raise InvalidOption(
            f"{spec.model!r} compares two texts, and a tree has one a file: name a source with text_pair."
        )
    if source.kind in WITH_COLUMNS and pair is None:
        raise InvalidOption(
            f"{spec.model!r} compares two texts: name the column of the second ones (text_pair)."
        )
    if parse_split(source).by != NONE:
        raise InvalidOption("A pair is judged whole: leave out the split.")


def needs_pairs(spec: EncodingSpec) -> bool:
    """Return whether a text without a pair fails: with a model that embeds. A classifier reads single texts too."""
    return spec.task == JUDGE and not spec.labels


def takes_pairs(source: Source, spec: EncodingSpec) -> bool:
    """Return whether rows that are pushed may have a second text."""
    return TASKS[spec.task].reads_pairs and parse_split(source).by == NONE
