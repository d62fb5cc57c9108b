"""Sources: where the texts of collections come from, tables that are followed, and pushes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vectormill.cli.commands.encode import PAIR_FIELD
from vectormill.cli.options import Json, KeyField, PairField, Strict, TextField, TextPair, with_client
from vectormill.domain.errors import InvalidOption

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill sources set handbook --tree docs/ --include '**/*.md' --split paragraphs",
    help="Set where the texts of a collection come from, so that it follows them.",
)
# Beside the other commands that send texts.
push_app = typer.Typer()

Collection = Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection.")]
Followed = Annotated[
    str,
    typer.Argument(
        metavar="COLLECTION", help="The collection; its source must be SQL in the service's own Postgres."
    ),
]
Texts = list[str] | None

# A query begins with one of these words.
QUERY_WORDS: Final = ("SELECT", "WITH", "TABLE", "VALUES")


@app.command(
    "set",
    epilog='Examples: vectormill sources set articles --sql "SELECT id, body, lang FROM articles" --key id --text body '
    "--metadata lang --url-env ARTICLES_URL\n\n"
    "vectormill sources set articles --files 'data/*.parquet' --key id --text body\n\n"
    "vectormill sources set handbook --tree docs/ --include '**/*.md' --split tokens:256:32\n\n"
    "vectormill sources set articles --push",
)
@with_client
def set_source(
    client: "Client",
    collection: Collection,
    sql: Annotated[
        str | None, typer.Option("--sql", metavar="QUERY", help="Read the rows of a query.")
    ] = None,
    files: Annotated[
        Texts,
        typer.Option(
            "--files",
            metavar="GLOB",
            help="Read JSONL, CSV or Parquet: a path, glob or URL. May be repeated.",
        ),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option("--tree", metavar="FOLDER", help="Read the text and Markdown files below a folder."),
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Take the rows that `vectormill push` sends.")] = False,
    own_texts: Annotated[
        bool, typer.Option("--own-texts", help="Take the texts that the collection keeps itself.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="COLUMN", help="The column with the key.", show_default="key"),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="COLUMN", help="The column with the text.", show_default="text"),
    ] = None,
    text_pair: TextPair = None,
    metadata: Annotated[
        Texts,
        typer.Option("--metadata", metavar="COLUMN", help="A column to keep as metadata. May be repeated."),
    ] = None,
    metadata_json: Annotated[
        str | None,
        typer.Option(
            "--metadata-json",
            metavar="COLUMN",
            help="The column with the metadata as JSON objects, instead of --metadata.",
        ),
    ] = None,
    url_env: Annotated[
        str | None,
        typer.Option(
            "--url-env",
            metavar="VARIABLE",
            help="The environment variable with the database's URL, in the processes that read the source.",
        ),
    ] = None,
    url_file: Annotated[
        str | None,
        typer.Option(
            "--url-file",
            metavar="FILE",
            help="The file with the database's URL, likewise. Without either, the service's own database is read.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="NAME", help="jsonl, csv, tsv or parquet. By default, the files' extensions."
        ),
    ] = None,
    include: Annotated[
        Texts,
        typer.Option(
            "--include",
            metavar="PATTERN",
            help="Read only files of the tree that match this pattern. May be repeated.",
        ),
    ] = None,
    exclude: Annotated[
        Texts,
        typer.Option(
            "--exclude", metavar="PATTERN", help="Skip files that match this pattern. May be repeated."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="HOW",
            help="Split texts into passages: paragraphs[:MIN:MAX] or tokens:N[:OVERLAP].",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read the first rows before the source is saved.")
    ] = True,
    json: Json = False,
) -> None:
    """Set the source of a collection, and show its first rows.

    The API and the indexer read the source: paths and variables are theirs.
    """
    columns: dict[str, Any] = {
        "key": key,
        "text": text,
        "text_pair": text_pair,
        "metadata": metadata,
        "metadata_json": metadata_json,
    }
    kind, options = choose_kind(
        {
            "sql": None
            if sql is None
            else {"query": sql, **columns, "url_env": url_env, "url_file": url_file},
            "files": {"files": [absolute(name) for name in files], **columns, "format": format}
            if files
            else None,
            "tree": None
            if tree is None
            else {"folder": absolute(tree), "include": include, "exclude": exclude},
            "push": {} if push else None,
            "own_texts": {} if own_texts else None,
        }
    )
    saved = client.set_source(collection, kind, options, split=parse_split(split), check=check)
    _print_source(saved, json)


@app.command(epilog="Example: vectormill sources show articles")
@with_client
def show(client: "Client", collection: Collection, json: Json = False) -> None:
    """Show the source of a collection."""
    _print_source(client.source(collection), json)


@app.command(epilog="Example: vectormill sources check articles")
@with_client
def check(client: "Client", collection: Collection, json: Json = False) -> None:
    """Read the first rows of a collection's source, and show three of them. Changes nothing."""
    from vectormill.cli.views.listing import print_json

    found = client.check_source(collection)
    if json:
        print_json(found)
    else:
        _print_check(found)


@app.command(epilog="Example: vectormill sources delete articles")
@with_client
def delete(client: "Client", collection: Collection) -> None:
    """Remove the source of a collection; its rows stay."""
    client.delete_source(collection)
    typer.echo(f"Collection {collection} has no source now; its rows stay.")


@app.command(
    epilog="Examples: vectormill sources follow docs\n\n"
    "vectormill sources follow docs --table public.papers --key-column id"
)
@with_client
def follow(
    client: "Client",
    collection: Followed,
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="TABLE",
            help="The table to follow. By default, the query's.",
            show_default=False,
        ),
    ] = None,
    key_column: Annotated[
        str | None,
        typer.Option(
            "--key-column",
            metavar="COLUMN",
            help="The table's column with the key. By default, the query's.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Put triggers on the source's table, so that changes are encoded or deleted within seconds.

    Earlier changes are picked up by a re-index.
    """
    _print_following(client.follow(collection, table=table, key_column=key_column), json)


@app.command(epilog="Example: vectormill sources unfollow docs")
@with_client
def unfollow(client: "Client", collection: Followed, json: Json = False) -> None:
    """Remove the triggers. Rows of the collection stay."""
    _print_following(client.unfollow(collection), json)


@app.command(epilog="Example: vectormill sources following docs")
@with_client
def following(client: "Client", collection: Followed, json: Json = False) -> None:
    """Show which table a collection follows, and how many of its changes are pending."""
    _print_following(client.following(collection), json)


@push_app.command(
    epilog="Examples: vectormill push docs rows.jsonl --complete\n\nmake-rows | vectormill push docs -"
)
@with_client
def push(
    client: "Client",
    collection: Annotated[
        str, typer.Argument(metavar="COLLECTION", help="The collection; its source must be a push.")
    ],
    input: Annotated[
        str, typer.Argument(metavar="INPUT", help="JSONL, CSV or Parquet, a directory of text files, or -.")
    ],
    complete: Annotated[
        bool, typer.Option("--complete", help="These are all rows: delete rows that are not among them.")
    ] = False,
    key_field: KeyField = None,
    text_field: TextField = "text",
    pair_field: PairField = PAIR_FIELD,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Send rows to a collection, which is updated once all have arrived. Unchanged rows are not encoded again."""
    from vectormill.cli.views.listing import print_json
    from vectormill.files.rows import FAIL_ALONE, REFUSE, Fields
    from vectormill.files.texts import look_at_texts, read_texts

    fields = Fields(key_field, text_field, pair_field, REFUSE if strict else FAIL_ALONE)
    items = look_at_texts(read_texts(input, fields), whole=strict)
    pushed = client.push(collection, items, complete=complete)
    if json:
        print_json(pushed)
        return
    rest = "those that are not among them will be deleted" if complete else "nothing will be deleted"
    typer.echo(f"{pushed['num_items']:,} rows wait for an indexer as run {pushed['run']}; {rest}.", err=True)
    typer.echo(pushed["run"])


def _print_source(source: Mapping[str, Any], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json, print_table

    if is_json:
        print_json(source)
        return
    values = {"kind": source["kind"], **source["options"]}
    values |= {f"split {name}": value for name, value in source["split"].items()}
    print_table(("", ""), [(name, _describe(value)) for name, value in values.items()])
    if source["check"] is not None:
        _print_check(source["check"])


def _describe(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _print_check(found: Mapping[str, Any]) -> None:
    from vectormill.cli.views.listing import print_table

    has_pairs = any(row["text_pair"] is not None for row in found["rows"])
    if not found["num_sampled"]:
        typer.echo("The source has no rows yet.", err=True)
        return
    names = ("key", "text", "text_pair", "metadata") if has_pairs else ("key", "text", "metadata")
    print_table(names, [tuple(row[name] for name in names) for row in found["rows"]])
    all_rows = "" if found["num_rows"] is None else f" of about {found['num_rows']:,}"
    read = (
        f"all {found['num_sampled']:,}"
        if found["is_whole"]
        else f"the first {found['num_sampled']:,}{all_rows}"
    )
    typer.echo(f"Read {read} rows; their keys are unique.", err=True)
    for example in found["complaints"]["examples"]:
        typer.echo(example, err=True)


def _print_following(body: Mapping[str, Any], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json

    if is_json:
        print_json(body)
    elif body["table"] is None:
        typer.echo(f"{body['collection']} follows no table.")
    else:
        waiting = (
            f"{body['waiting_changes']:,} changes wait" if body["waiting_changes"] else "no change waits"
        )
        typer.echo(f"{body['collection']} follows {body['table']} by {body['key_column']}; {waiting}.")


def choose_kind(said: Mapping[str, Mapping[str, Any] | None]) -> tuple[str, dict[str, Any]]:
    """Return the one kind that options were given of, and those of them that were given. Raise InvalidOption."""
    given = {kind: options for kind, options in said.items() if options is not None}
    if len(given) != 1:
        raise InvalidOption("Name one source: --sql, --files, --tree, --push or --own-texts.")
    ((kind, options),) = given.items()
    return kind, {name: value for name, value in options.items() if value not in (None, [])}


def read_source(
    where: str, *, key: str | None, text: str | None, metadata: list[str] | None, text_pair: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Kind and options of a source that is said in a word: a query by its first one, a folder by being one."""
    columns = {"key": key, "text": text, "text_pair": text_pair, "metadata": metadata}
    words = where.split(None, 1)
    is_query = len(words) > 1 and words[0].upper() in QUERY_WORDS
    is_tree = not is_query and (where.endswith("/") or Path(where).expanduser().is_dir())
    return choose_kind(
        {
            "sql": {"query": where, **columns, "key": key or "key", "text": text or "text"}
            if is_query
            else None,
            "tree": {"folder": absolute(where)} if is_tree else None,
            "files": None if is_query or is_tree else {"files": [absolute(where)], **columns},
        }
    )


def absolute(name: str) -> str:
    """Return a local path from the root, as another process has another working directory; a URL as it is."""
    return name if "://" in name else str(Path(name).expanduser().absolute())


def parse_split(how: str | None) -> dict[str, Any]:
    """`paragraphs`, `paragraphs:200:1500`, `tokens:256`, `tokens:256:32` or `none`. Raise InvalidOption."""
    if how in (None, "none"):
        return {}
    by, *numbers = how.split(":")
    names = {"paragraphs": ("min_chars", "max_chars"), "tokens": ("tokens", "overlap")}.get(by, ())
    if not names or len(numbers) > len(names) or not all(number.isdecimal() for number in numbers):
        raise InvalidOption(
            f"{how!r} is not a valid split. Use paragraphs, paragraphs:MIN:MAX (characters), tokens:N or "
            "tokens:N:OVERLAP."
        )
    return {"by": by, **dict(zip(names, map(int, numbers), strict=False))}
