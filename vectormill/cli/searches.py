"""The commands that search a collection, and rank texts by their relevance to a query."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vectormill.cli.command import Client, Names, command, top
from vectormill.cli.files import read_input, read_lines
from vectormill.cli.printing import listing, print_json, print_table, tell
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import JUDGE
from vectormill.jobs.item import PASSAGE
from vectormill.models.suggestions import suggest_model

if TYPE_CHECKING:
    from vectormill.files.ndjson import ItemJson


MAX_TEXT_CELL = 100
# The texts of one request of a ranking: few enough for long ones, which count with the query against its 16 MiB.
RANKED_AT_ONCE = 250


@command(
    top,
    'vectormill search docstrings "how to parse a date" --limit 5',
    "vectormill search docs \"dates\" --filter lang=de --filter 'year>=2020' --include text",
    "vectormill search docs '\"time zone\" or dst' --mode text",
    "vectormill search docs --like json.dumps --by-document",
    'vectormill search docs "how to parse a date" --outputs dense,sparse,multi_vector',
)
def search(
    client: Client,
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
    from vectormill.search.operations import list_notes

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
    for note in list_notes(vars(matches), collection):
        tell(note)
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
            # The reserved entry on passages has a column of its own.
            own = {name: value for name, value in (match.get("metadata") or {}).items() if name != PASSAGE}
            shown["metadata"] = own or None
        rows.append([shown.get(name) for name in columns])
    print_table(columns, rows)


def shorten(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_TEXT_CELL else f"{text[: MAX_TEXT_CELL - 1]}…"


@command(
    top,
    'vectormill rerank "how to parse a date" passages.txt --limit 5',
    'grep -rhi todo src | vectormill rerank "what is urgent" --model reranker',
    'vectormill rerank "how to parse a date" tickets.jsonl --text-field body --json',
    note=f"A model that scores pairs ranks best.{suggest_model(JUDGE)}",
    view=listing(
        ("score", lambda ranked: f"{ranked['score']:.4f}"),
        "key",
        ("text", lambda ranked: shorten(ranked["text"])),
    ),
)
def rerank(
    client: Client,
    query: str,
    input: str = "-",
    *,
    limit: int = 10,
    model: str | None = None,
    max_tokens: int | None = None,
    key_field: str | None = None,
    text_field: str = "text",
) -> list[dict[str, Any]]:
    """Rank texts by how well they answer a query, the best first. Nothing is stored.

    Args:
        query (QUERY): The text to compare with.
        input (INPUT): A file with a text a line, a JSONL, CSV or Parquet file, or - for lines from stdin. Blank lines
            are left out.
        limit (N, from 1): Show at most N texts.
        model (NAME): A registered model. By default the packaged embedding model, by the cosine of vectors.
        max_tokens (N, from 1): Cut a query and a text together after N tokens.
    """
    from vectormill.client.progress import Progress, ProgressView

    best: list[dict[str, Any]] = []
    num_ranked = 0
    texts = (item for item in read_texts(input, key_field, text_field) if item["text"].strip())
    with Progress(lambda told: ProgressView("ranking", f"{told['num_ranked']:,} texts")) as progress:
        while part := list(islice(texts, RANKED_AT_ONCE)):
            answer = client.rerank(
                query, [item["text"] for item in part], model=model, top_n=limit, max_tokens=max_tokens
            )
            for found in answer["results"]:
                item = part[found["index"]]
                best.append({"key": item["key"], "score": found["relevance_score"], "text": item["text"]})
            best = sorted(best, key=lambda ranked: -ranked["score"])[:limit]
            num_ranked += len(part)
            progress({"num_ranked": num_ranked})
    if not best:
        raise InvalidOption(f"{input} has no texts to rank.")
    return best


def read_texts(input: str, key_field: str | None, text_field: str) -> "Iterable[ItemJson]":
    """Return the rows of a structured file, or the lines of any other, whose keys are their numbers."""
    from vectormill.rows.inputs import find_format

    if Path(input).is_dir() or find_format(input):
        return read_input(input, key_field, text_field, strict=True)
    return ({"key": str(number), "text": line.strip()} for number, line in enumerate(read_lines(input), 1))
