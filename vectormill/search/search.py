"""Search: the types of a search and its matches, without SQL and without the encoding of texts."""

from dataclasses import dataclass
from typing import Any, Final

from vectormill.domain.errors import InvalidOption
from vectormill.search.filter import Filter

# The modes of a search: by similarity of vectors, by words (Postgres full-text search), or by both.
BY_VECTOR: Final = "vector"
BY_TEXT: Final = "text"
HYBRID: Final = "hybrid"

SEARCH_MODES: Final = (BY_VECTOR, BY_TEXT, HYBRID)

VECTOR: Final = "vector"
TEXT: Final = "text"
METADATA: Final = "metadata"

INCLUDABLE: Final = (VECTOR, TEXT, METADATA)

MAX_LIMIT: Final = 1000
MAX_OFFSET: Final = 1000
# The constant of reciprocal rank fusion: the score of a row is the sum of weight / (60 + rank) over its rankings
# (Cormack, Clarke and Büttcher, SIGIR 2009, who found 60 good and not critical).
FUSION_CONSTANT: Final = 60


@dataclass(frozen=True, slots=True)
class Search:
    """The parameters of one search. Its vector is passed separately, unless it is that of the row with the key `like`.

    `words` are for full-text search, in the syntax of web search engines. With `by_document` each document has only its
    best row as a match. `ef_search` is the number of candidates of an HNSW index; if None it follows from the limit.
    """

    limit: int = 10
    offset: int = 0
    mode: str = BY_VECTOR
    words: str | None = None
    like: str | None = None
    condition: Filter | None = None
    by_document: bool = False
    include: tuple[str, ...] = (METADATA,)
    min_score: float | None = None
    ef_search: int | None = None
    vector_weight: float = 1.0
    text_weight: float = 1.0

    @property
    def num_wanted(self) -> int:
        """Return the number of best rows up to the end of the page: offset + limit."""
        return self.offset + self.limit

    @property
    def reads_words(self) -> bool:
        return self.mode in (BY_TEXT, HYBRID)


@dataclass(frozen=True, slots=True)
class Match:
    """A row that a search found.

    By vector, `score` is the cosine similarity, -1 to 1 (in a binary collection, that of the signs); by words, the
    cover density; by both, the reciprocal rank fusion of `vector_rank` and `text_rank`, the row's ranks from 1.
    `passage` is the span of the document that the row holds: document, index, start, end.
    """

    key: str
    score: float
    metadata: dict[str, Any] | None = None
    text: str | None = None
    embedding: list[Any] | None = None
    passage: dict[str, Any] | None = None
    vector_rank: int | None = None
    text_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Nearest:
    """The matches of one search, best first.

    `num_rows_read` is the approximate number of rows if all were read, else None. `repeated_because` is the reason why
    an exact search followed the one by index, or None.
    """

    matches: list[Match]
    num_rows_read: int | None
    repeated_because: str | None = None


def check_search(search: Search) -> None:
    """Raise InvalidOption if parts of the search contradict each other."""
    if search.reads_words and search.words is None:
        raise InvalidOption(f"A search in mode {search.mode} needs a text.")
    if search.reads_words and search.like is not None:
        raise InvalidOption(
            f"more_like compares vectors; a search in mode {search.mode} needs a text instead."
        )
    if search.mode != BY_VECTOR and search.min_score is not None:
        raise InvalidOption(
            f"min_score is a cosine similarity, which mode {search.mode} does not use for its scores; omit it."
        )
    if search.mode == BY_TEXT and search.ef_search is not None:
        raise InvalidOption(
            "ef_search applies to the vector index, which a search in mode text does not use."
        )
    if not search.vector_weight + search.text_weight > 0:
        raise InvalidOption("At least one of the weights of vector and text must be above 0.")
