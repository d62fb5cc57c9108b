"""The command that searches a collection."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import typer

from vectormill.cli.command import Names, command
from vectormill.cli.printing import print_json, print_table, tell
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.item import PASSAGE

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer()

MAX_TEXT_CELL = 100
# The hint to build an index is for larger collections only: fewer rows are scanned in milliseconds.
MANY_ROWS = 10_000


@command(
    app,
    'vectormill search docstrings "how to parse a date" --limit 5',
    "vectormill search docs \"dates\" --filter lang=de --filter 'year>=2020' --include text",
    "vectormill search docs '\"time zone\" or dst' --mode text",
    "vectormill search docs --like json.dumps --by-document",
    'vectormill search docs "how to parse a date" --outputs dense,sparse,multi_vector',
)
def search(
    client: "Client",
    collection: str,
    text: str | None = None,
    *,
    limit: int = 10,
    offset: int | None = None,
    filter: list[str] | None = None,
    mode: Literal["vector", "text", "hybrid"] | None = None,
    hybrid: bool = False,
    weights: str | None = None,
    like: str | None = None,
    outputs: Names | None = None,
    include: Names | None = None,
    by_document: bool = False,
    min_score: float | None = None,
    ef_search: int | None = None,
    fingerprint: str | None = None,
    json: bool = False,
) -> None:
    """Find the items of a collection that match a text best: by meaning, by words, or by both.

    Args:
        text (TEXT): The text to search for. Not with --like.
        limit (N, 1 to 1000): Show at most N matches.
        offset (N, 0 to 1000): Skip the first N matches.
        filter (FILTER): A condition on the metadata: lang=de, year>=2020 or '{"lang": {"in": ["de", "fr"]}}'. May be
            repeated; all must hold.
        mode: Search by vectors, by words or by both.  [default: vector]
        hybrid: Short for --mode hybrid.
        weights (VECTOR:TEXT): The weights of vectors and words in --hybrid as VECTOR:TEXT, for example 2:1.
            [default: 1:1]
        like (KEY): Find rows similar to the row with this key, instead of TEXT.
        outputs (NAME): An output of the collection that is compared: dense, sparse or multi_vector. By default dense,
            or the first that the collection has.
        include (text|vector): Also show this part of each match.
        by_document: Show only the best passage of each document.
        min_score (X): Leave out matches with a lower score.
        ef_search (N, 1 to 1000): Candidates that an HNSW index examines; more find more and take longer.
        fingerprint (HEX): Fail if the collection has another vector space.
    """
    from vectormill.search.filter import read_filters

    if hybrid and mode not in (None, "hybrid"):
        raise InvalidOption(f"--hybrid means --mode hybrid and cannot be combined with --mode {mode}.")
    if (text is None) == (like is None):
        raise InvalidOption("A search needs either TEXT or --like KEY.")
    unknown = set(include or ()) - {"text", "vector", "metadata"}
    if unknown:
        raise InvalidOption(f"--include takes text or vector, not {', '.join(sorted(unknown))}.")
    matches = client.search(
        collection,
        text,
        more_like=like,
        limit=limit,
        offset=offset,
        filter=read_filters(filter or ()),
        mode="hybrid" if hybrid else mode,
        weights=None if weights is None else read_weights(weights),
        outputs=outputs,
        include=["metadata", *include] if include else None,
        group_by="document" if by_document else None,
        min_score=min_score,
        ef_search=ef_search,
        fingerprint=fingerprint,
    )
    if matches.repeated_because is not None:
        tell(f"Repeated as an exact search, because {matches.repeated_because}.")
    elif (matches.num_rows_read or 0) >= MANY_ROWS:
        tell(
            f"No vector index served this search: all rows of {collection}, about {matches.num_rows_read:,}, were "
            f"read. `vectormill collections index {collection}` shows the indexes, and `vectormill collections index "
            f"{collection} --policy hnsw --wait` builds one."
        )
    if matches.missing_fields:
        tell(f"No row that was sampled has the metadata field {' or '.join(matches.missing_fields)}.")
    if not json:
        print_matches(matches, include or ())
        return
    for match in matches:
        print_json(match)


def read_weights(written: str) -> dict[str, float]:
    """Parse weights written as `VECTOR:TEXT`. Raise InvalidOption for any other form."""
    try:
        vector, text = map(float, written.split(":"))
    except ValueError as error:
        raise InvalidOption(f"--weights expects VECTOR:TEXT, for example 2:1; got {written!r}.") from error
    return {"vector": vector, "text": text}


def print_matches(matches: Sequence[Mapping[str, Any]], include: Sequence[str]) -> None:
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
    """Return the client's own metadata, without the reserved entry on passages, which has a column.

    Return None if nothing is left.
    """
    own = {name: value for name, value in (metadata or {}).items() if name != PASSAGE}
    return own or None
