"""Search what a collection holds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vectormill.cli.options import Json, with_client
from vectormill.jobs.item import PASSAGE
from vectormill.search.search import MAX_LIMIT, MAX_OFFSET

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer()

MAX_TEXT_CELL = 100
# Fewer are read in milliseconds with an index or without, and whether one served is nothing to act upon.
MANY_ROWS = 10_000


@app.command(
    epilog='Examples: vectormill search docstrings "how to parse a date" --limit 5\n\n'
    "vectormill search docs \"dates\" --filter lang=de --filter 'year>=2020' --include text\n\n"
    "vectormill search docs '\"time zone\" or dst' --mode text\n\n"
    "vectormill search docs --like json.dumps --by-document"
)
@with_client
def search(
    client: "Client",
    collection: Annotated[str, typer.Argument(metavar="COLLECTION")],
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text to search for. Not with --like.")
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=MAX_LIMIT, help="Show at most N matches.")
    ] = 10,
    offset: Annotated[
        int | None,
        typer.Option("--offset", metavar="N", min=0, max=MAX_OFFSET, help="Skip the first N matches."),
    ] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="FILTER",
            help='A condition on the metadata: lang=de, year>=2020 or \'{"lang": {"in": ["de", "fr"]}}\'. May '
            "be repeated; all must hold.",
        ),
    ] = None,
    mode: Annotated[
        Literal["vector", "text", "hybrid"] | None,
        typer.Option("--mode", help="Search by vectors, by words or by both.", show_default="vector"),
    ] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Short for --mode hybrid.")] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="VECTOR:TEXT",
            help="The weights of vectors and words in --hybrid as VECTOR:TEXT, for example 2:1.",
            show_default="1:1",
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="KEY", help="Find rows similar to the row with this key, instead of TEXT."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include", metavar="text|vector", help="Also show this part of each match. May be repeated."
        ),
    ] = None,
    by_document: Annotated[
        bool, typer.Option("--by-document", help="Show only the best passage of each document.")
    ] = False,
    min_score: Annotated[
        float | None, typer.Option("--min-score", metavar="X", help="Leave out matches with a lower score.")
    ] = None,
    ef_search: Annotated[
        int | None,
        typer.Option(
            "--ef-search",
            metavar="N",
            min=1,
            max=1000,
            help="Candidates that an HNSW index examines; more find more and take longer.",
        ),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", metavar="HEX", help="Fail if the collection has another vector space."),
    ] = None,
    json: Json = False,
) -> None:
    """Find the items of a collection that match a text best: by meaning, by words, or by both."""
    from vectormill.cli.views.listing import print_json
    from vectormill.domain.errors import InvalidOption
    from vectormill.search.filter import read_filters

    if hybrid and mode not in (None, "hybrid"):
        raise InvalidOption(f"--hybrid is --mode hybrid, and --mode {mode} is given too; leave one out.")
    if (text is None) == (like is None):
        raise InvalidOption("A search needs either TEXT or --like KEY.")
    unknown = set(include or ()) - {"text", "vector", "metadata"}
    if unknown:
        raise InvalidOption(f"--include takes text or vector, not {', '.join(sorted(unknown))}.")
    condition = read_filters(filters or ())
    matches = client.search(
        collection,
        text,
        more_like=like,
        limit=limit,
        offset=offset,
        filter=condition,
        mode="hybrid" if hybrid else mode,
        weights=None if weights is None else read_weights(weights),
        include=["metadata", *include] if include else None,
        group_by="document" if by_document else None,
        min_score=min_score,
        ef_search=ef_search,
        fingerprint=fingerprint,
    )
    if (matches.num_rows_read or 0) >= MANY_ROWS:
        typer.echo(
            f"No index: all of about {matches.num_rows_read:,} rows of {collection} were read. "
            'docs/OPERATIONS.md, "Search and indexes", builds one.',
            err=True,
        )
    if matches.repeated_because is not None:
        typer.echo(f"Searched again exactly, for {matches.repeated_because}.", err=True)
    if json:
        for match in matches:
            print_json(match)
        return
    print_matches(matches, include or ())


def read_weights(written: str) -> dict[str, float]:
    """`2:1` is {"vector": 2, "text": 1}. Raise InvalidOption."""
    from vectormill.domain.errors import InvalidOption

    try:
        vector, text = map(float, written.split(":"))
    except ValueError as error:
        raise InvalidOption(f"--weights expects VECTOR:TEXT, for example 2:1; got {written!r}.") from error
    return {"vector": vector, "text": text}


def print_matches(matches: Sequence[Mapping[str, Any]], include: Any) -> None:
    from vectormill.cli.views.listing import print_table

    columns = ["score", "key", "metadata"]
    has_documents = any("document" in match for match in matches)
    columns += ["document"] if has_documents else []
    columns += [name for name in ("text", "vector") if name in include]
    rows = []
    for match in matches:
        shown = {**match, "score": f"{match['score']:.4f}", "vector": match.get("embedding")}
        shown["text"] = shorten(match.get("text"))
        if has_documents:
            shown["metadata"] = hide_passage(match.get("metadata"))
        rows.append([shown.get(name) for name in columns])
    print_table(columns, rows)


def shorten(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_TEXT_CELL else f"{text[: MAX_TEXT_CELL - 1]}…"


def hide_passage(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the client's own metadata; the document has a column."""
    own = {name: value for name, value in (metadata or {}).items() if name != PASSAGE}
    return own or None
