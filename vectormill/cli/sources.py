"""Commands for sources of collections, followed tables, and pushes."""

from collections.abc import Iterator, Mapping
from dataclasses import make_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from vectormill.cli.command import Client, command, find_flag, top
from vectormill.cli.files import read_input
from vectormill.cli.printing import print_json, print_table, tell
from vectormill.domain.errors import InvalidOption
from vectormill.domain.options import find_given, list_options
from vectormill.files.formats import PAIR_FIELD
from vectormill.sources.source import FILES, KINDS, SQL, TREE

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill sources set handbook --tree docs/ --include '**/*.md' --split paragraphs",
    help="Set where the texts of a collection come from, so that it follows them.",
)

# A source that begins with one of these words is a query.
QUERY_WORDS: Final = ("SELECT", "WITH", "TABLE", "VALUES")


def list_flags() -> Iterator[tuple[str, Any, Any]]:
    """Yield the options of all kinds as fields without defaults of their own; first those that tell the kind."""
    known: set[str] = set()
    for option in chain((kind.leading() for kind in KINDS.values()), *map(list_options, KINDS.values())):
        if option.name not in known:
            known.add(option.name)
            unset = str(option.default) if isinstance(option.default, (str, int)) and option.default else None
            kind: Any = option.kind
            yield (
                option.name,
                Annotated[kind | None, replace(option.help, unset=unset)],
                False if kind is bool else None,
            )


class SourceFlags(make_dataclass("Flags", list_flags())):  # type: ignore[misc]  # of its fields
    """The flags that describe a source of any kind."""


def show_source(source: Mapping[str, Any]) -> None:
    values = {"kind": source["kind"], **source["options"]}
    values |= {f"split {name}": value for name, value in source["split"].items()}
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in values.items()
    ]
    print_table(("", ""), rows)
    if source["check"] is not None:
        show_check(source["check"])


def show_check(found: Mapping[str, Any]) -> None:
    has_pairs = any(row["text_pair"] is not None for row in found["rows"])
    if not found["num_sampled"]:
        tell("The source has no rows yet.")
        return
    names = ("key", "text", "text_pair", "metadata") if has_pairs else ("key", "text", "metadata")
    print_table(names, [tuple(row[name] for name in names) for row in found["rows"]])
    read = f"{'all' if found['is_whole'] else 'the first'} {found['num_sampled']:,}"
    if not found["is_whole"] and found["num_rows"] is not None:
        read += f" of about {found['num_rows']:,}"
    tell(f"Read {read} rows; their keys are unique.")
    for example in found["complaints"]["examples"]:
        tell(example)


def show_following(following: Mapping[str, Any]) -> None:
    if following["table"] is None:
        typer.echo(f"{following['collection']} follows no table.")
        return
    num_waiting = following["waiting_changes"]
    waiting = f"{num_waiting:,} changes pending" if num_waiting else "no changes pending"
    typer.echo(
        f"{following['collection']} follows {following['table']} by {following['key_column']}; {waiting}."
    )


@command(
    app,
    'vectormill sources set articles --sql "SELECT id, body, lang FROM articles" --key id --text body '
    "--metadata lang --url-env ARTICLES_URL",
    "vectormill sources set articles --files 'data/*.parquet' --key id --text body",
    "vectormill sources set handbook --tree docs/ --include '**/*.md' --split tokens:256:32",
    "vectormill sources set articles --push",
    name="set",
    view=show_source,
)
def set_source(
    client: Client,
    collection: str,
    *,
    source: SourceFlags,
    split: str | None = None,
    check: bool = True,
) -> Mapping[str, Any]:
    """Set the source of a collection, and show its first rows.

    The API and the indexer read the source, so paths and variables must exist there.

    Args:
        split (HOW): Split texts into passages: paragraphs[:MIN:MAX] or tokens:N[:OVERLAP].
        check: Read the first rows before the source is saved.
    """
    kind, options = choose_kind({name: value for name, value in find_given(source).items() if value})
    return client.set_source(collection, kind, options, split=parse_split(split), check=check)


@command(app, "vectormill sources show articles", view=show_source)
def show(client: Client, collection: str) -> Mapping[str, Any]:
    """Show the source of a collection."""
    return client.source(collection)


@command(app, "vectormill sources check articles", view=show_check)
def check(client: Client, collection: str) -> Mapping[str, Any]:
    """Read the first rows of a collection's source, and show three of them. Changes nothing."""
    return client.check_source(collection)


@command(app, "vectormill sources delete articles")
def delete(client: Client, collection: str) -> None:
    """Remove the source of a collection; its rows stay."""
    client.delete_source(collection)
    typer.echo(f"Collection {collection} no longer has a source; its rows stay.")


@command(
    app,
    "vectormill sources follow docs",
    "vectormill sources follow docs --table public.papers --key-column id",
    view=show_following,
)
def follow(
    client: Client, collection: str, *, table: str | None = None, key_column: str | None = None
) -> Mapping[str, Any]:
    """Put triggers on the source's table, so that changes are encoded or deleted within seconds.

    Earlier changes are picked up by a re-index.

    Args:
        collection (COLLECTION): The collection; its source must be SQL in the service's own Postgres.
        table (TABLE): The table to follow. By default, the query's.
        key_column (COLUMN): The table's column with the key. By default, the query's.
    """
    return client.follow(collection, table=table, key_column=key_column)


@command(app, "vectormill sources unfollow docs", view=show_following)
def unfollow(client: Client, collection: str) -> Mapping[str, Any]:
    """Remove the triggers. Rows of the collection stay.

    Args:
        collection (COLLECTION): The collection; its source must be SQL in the service's own Postgres.
    """
    return client.unfollow(collection)


@command(app, "vectormill sources following docs", name="following", view=show_following)
def show_followed(client: Client, collection: str) -> Mapping[str, Any]:
    """Show which table a collection follows, and how many of its changes are pending.

    Args:
        collection (COLLECTION): The collection; its source must be SQL in the service's own Postgres.
    """
    return client.following(collection)


@command(top, "vectormill push docs rows.jsonl --complete", "make-rows | vectormill push docs -")
def push(
    client: Client,
    collection: str,
    input: str,
    *,
    complete: bool = False,
    key_field: str | None = None,
    text_field: str = "text",
    pair_field: str = PAIR_FIELD,
    strict: bool = False,
    json: bool = False,
) -> None:
    """Send rows to a collection, which is updated once all have arrived. Unchanged rows are not encoded again.

    Args:
        collection (COLLECTION): The collection; its source must be a push.
        input (INPUT): JSONL, CSV or Parquet, a directory of text files, or -.
        complete: These are all rows: delete rows that are not among them.
    """
    items = read_input(input, key_field, text_field, pair_field, strict=strict)
    pushed = client.push(collection, items, complete=complete)
    if json:
        print_json(pushed)
        return
    rest = "all other rows will be deleted" if complete else "nothing will be deleted"
    tell(f"{pushed['num_items']:,} rows are waiting for an indexer, as run {pushed['run']}; {rest}.")
    typer.echo(pushed["run"])


def choose_kind(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of source that the flags name, and its options. Raise InvalidOption for flags of another."""
    leading = {kind: options.leading() for kind, options in KINDS.items()}
    named = [kind for kind, option in leading.items() if given.get(option.name)]
    if len(named) != 1:
        *flags, last = (find_flag(option) for option in leading.values())
        raise InvalidOption(f"Name one source: {', '.join(flags)} or {last}.")
    (kind,) = named
    known = [option.name for option in list_options(KINDS[kind])]
    foreign = [
        find_flag(each) for each in list_options(SourceFlags) if each.name in set(given) - {*known, kind}
    ]
    if foreign:
        raise InvalidOption(f"A source of kind {kind} takes no {', '.join(foreign)}.")
    options = {name: given[name] for name in known if name in given}
    if kind == FILES:
        options["files"] = list(map(absolute, options["files"]))
    if kind == TREE:
        options["folder"] = absolute(options["folder"])
    return kind, options


def read_source(
    where: str, *, key: str | None, text: str | None, metadata: list[str] | None, text_pair: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the kind and options of a source given as one string: a query, a folder or a file pattern.

    A query is recognised by its first word, and a folder because it exists.
    """
    words = where.split(None, 1)
    options: dict[str, Any] = {"key": key, "text": text, "text_pair": text_pair, "metadata": metadata}
    if len(words) > 1 and words[0].upper() in QUERY_WORDS:
        kind, options = SQL, {"query": where, **options, "key": key or "key", "text": text or "text"}
    elif where.endswith("/") or Path(where).expanduser().is_dir():
        kind, options = TREE, {"folder": absolute(where)}
    else:
        kind, options = FILES, {"files": [absolute(where)], **options}
    return kind, {name: value for name, value in options.items() if value not in (None, [])}


def absolute(name: str) -> str:
    """Return a local path as an absolute path, because another process reads it; a URL is unchanged."""
    return name if "://" in name else str(Path(name).expanduser().absolute())


def parse_split(how: str | None) -> dict[str, Any]:
    """Parse a split written as `paragraphs:200:1500`, `tokens:256:32` or `none`. Raise InvalidOption."""
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
