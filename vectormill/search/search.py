"""Search: what is asked of a collection, and what it finds. Knows nothing of SQL, nor how a text becomes a vector."""

from dataclasses import dataclass
from typing import Any, Final

from vectormill.domain.errors import InvalidOption
from vectormill.search.filter import Filter

# By nearness of vectors, by words (Postgres full text), by both.
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
# The constant of reciprocal rank fusion: a row's score is the sum of weight / (60 + rank) over the rankings that it is
# in (Cormack, Clarke and Büttcher, SIGIR 2009, who found 60 good and not critical).
FUSION_CONSTANT: Final = 60


@dataclass(frozen=True, slots=True)
class Search:
    """One search. A vector, where the mode needs one, comes beside it, unless it is that of the row `like`.

    `words` are for full text, in the syntax of web search engines. A result is one row, or `by_document` the best row
    of each document. `ef_search` is how many candidates an HNSW index keeps in view; else the limit decides.
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
        """Return the number of results until the end of the page."""
        return self.offset + self.limit

    @property
    def reads_words(self) -> bool:
        return self.mode in (BY_TEXT, HYBRID)


@dataclass(frozen=True, slots=True)
class Match:
    """One search result.

    `score` is the cosine similarity, -1 to 1, in a binary collection that of the signs; by words their cover density;
    of both, what reciprocal rank fusion makes of a row's places, which are `vector_rank` and `text_rank`, from 1 on.
    `passage` is the span of its document that a row holds: document, index, start, end.
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
    """Matches, best first. `num_rows_read` is about how many rows the collection has when all were read, else None.

    `repeated_because` says why an exact search followed that of the index.
    """

    matches: list[Match]
    num_rows_read: int | None
    repeated_because: str | None = None


def check_search(search: Search) -> None:
    """Raise InvalidOption when parts of the search contradict each other."""
    if search.reads_words and search.words is None:
        raise InvalidOption(f"A search in mode {search.mode} needs a text, whose words are looked for.")
    if search.reads_words and search.like is not None:
        raise InvalidOption(
            f"more_like compares vectors; a search in mode {search.mode} needs a text instead."
        )
    if search.mode != BY_VECTOR and search.min_score is not None:
        raise InvalidOption(
            f"min_score is a cosine similarity, and the scores of mode {search.mode} are none; leave it out."
        )
    if search.mode == BY_TEXT and search.ef_search is not None:
        raise InvalidOption("ef_search is of the vector index, which a search in mode text does not use.")
    if not search.vector_weight + search.text_weight > 0:
        raise InvalidOption("One of the weights of vector and text must be above 0.")
