"""Search: the parameters of a search, without SQL and without the encoding of texts."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, MULTI_VECTOR, OUTPUTS, SPARSE
from vectormill.search.filter import Filter

# The modes of a search: by similarity of vectors, by words (Postgres full-text search), or by both.
BY_VECTOR: Final = "vector"
BY_TEXT: Final = "text"
HYBRID: Final = "hybrid"

VECTOR: Final = "vector"
TEXT: Final = "text"
METADATA: Final = "metadata"

MAX_LIMIT: Final = 1000
MAX_OFFSET: Final = 1000
# A page is cut from rankings whose depth follows from its tier: the smallest of 25, 50, 100, … that holds all rows up
# to the end of the page. So pages of one tier are cut from the same list.
LEAST_TIER: Final = 25
# Rankings that are fused, and candidates of MaxSim, are so many times as deep as the tier, since a row far down in one
# may come first after all.
DEPTH: Final = 4
# hnsw.ef_search is the number of candidates of an index scan: 40 by pgvector's default, at most 1,000. If it equals the
# number of wanted rows, the last of these are often missed: of 20,000 random vectors, the worst case, 200 candidates
# held 73 % of the 200 nearest, and 400 held 93 %.
LEAST_CANDIDATES: Final = 100
CANDIDATES_PER_ROW: Final = 2
MOST_CANDIDATES: Final = 1000
# The constant of reciprocal rank fusion: the score of a row is the sum of weight / (60 + rank) over its rankings
# (Cormack, Clarke and Büttcher, SIGIR 2009, who found 60 good and not critical).
FUSION_CONSTANT: Final = 60


@dataclass(frozen=True, slots=True)
class Search:
    """The parameters of one search. Its vector is passed separately, unless it is that of the row with the key `like`.

    `words` are for full-text search, in the syntax of web search engines. With `by_document` each document has only its
    best row as a match. `outputs` are the outputs of the collection that are compared: rankings by `dense` and `sparse`
    are fused with each other and with that by words, and `multi_vector` orders the best rows of these anew, or all rows
    if there is no other ranking. `ef_search` is the number of candidates of an HNSW index; if None it follows from the
    limit.
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
    outputs: tuple[str, ...] = (DENSE,)
    sparse_weight: float = 1.0

    @property
    def ranked_outputs(self) -> tuple[str, ...]:
        """Return the outputs by each of which all rows are ranked."""
        return () if self.mode == BY_TEXT else tuple(name for name in self.outputs if name != MULTI_VECTOR)

    @property
    def num_rankings(self) -> int:
        """Return how many rankings are fused: by dense vectors, by sparse ones, and by words."""
        return len(self.ranked_outputs) + self.reads_words

    @property
    def is_fused(self) -> bool:
        return self.num_rankings > 1

    @property
    def num_wanted(self) -> int:
        """Return the number of best rows up to the end of the page: offset + limit."""
        return self.offset + self.limit

    @property
    def reads_words(self) -> bool:
        return self.mode in (BY_TEXT, HYBRID)

    @property
    def is_sliced(self) -> bool:
        """Return whether the page is a slice of one ranking, which needs no row before or after it."""
        is_bare = self.num_rankings == 1 and SPARSE not in self.ranked_outputs
        return is_bare and not self.by_document and MULTI_VECTOR not in self.outputs

    @property
    def needs_depth(self) -> bool:
        """Return whether the rows of a page depend on how deep its rankings are."""
        return self.is_fused or (MULTI_VECTOR in self.outputs and self.num_rankings > 0)

    @property
    def tier(self) -> int:
        """Return the number of rows, at least `num_wanted`, from which the depth of the rankings follows."""
        return LEAST_TIER << max(math.ceil(math.log2(self.num_wanted / LEAST_TIER)), 0)

    @property
    def num_candidates(self) -> int:
        """Return how many candidates an HNSW index examines (hnsw.ef_search)."""
        return self.ef_search or choose_num_candidates(self.tier)


def choose_num_candidates(num_wanted: int) -> int:
    return min(MOST_CANDIDATES, max(LEAST_CANDIDATES, CANDIDATES_PER_ROW * num_wanted))


def fit_outputs(search: Search, asked: Sequence[str] | None, spec: EncodingSpec, collection: str) -> Search:
    """Return the search with the outputs that it compares in a collection of this spec; `asked` are those of the query.

    By default they are `dense`, or the first output that the collection has. Raise InvalidOption.
    """
    kept = [name for name in OUTPUTS if spec.has_output(name)]
    has = f"Collection {collection!r} has the outputs {', '.join(kept)}"
    if VECTOR in search.include and DENSE not in kept:
        raise InvalidOption(f"{has}: omit {VECTOR!r} from include, which is the dense vector.")
    if asked is None:
        outputs = [] if search.mode == BY_TEXT else kept[:1]
    else:
        outputs = [name for name in OUTPUTS if name in asked]
        if not outputs or not set(outputs) <= set(kept):
            raise InvalidOption(f"{has}; outputs must be some of them, and not {', '.join(asked) or 'none'}.")
        if search.mode == BY_TEXT and outputs != [MULTI_VECTOR]:
            raise InvalidOption(
                f"A search in mode {BY_TEXT} finds rows by words, which only {MULTI_VECTOR} can order anew; omit other "
                f"outputs, or use mode {HYBRID}."
            )
    return replace(search, outputs=tuple(outputs))


def check_search(search: Search) -> None:
    """Raise InvalidOption if parts of the search contradict each other."""
    mode, reads_words = search.mode, search.reads_words
    is_scored = search.min_score is not None
    weight = search.vector_weight + search.text_weight + search.sparse_weight * (SPARSE in search.outputs)
    for is_so, sentence in (
        (reads_words and search.words is None, f"A search in mode {mode} needs a text."),
        (reads_words and search.like is not None, f"more_like compares vectors; mode {mode} needs a text."),
        (is_scored and mode != BY_VECTOR, f"min_score is a similarity of vectors; omit it in mode {mode}."),
        (is_scored and search.outputs != (DENSE,), "min_score is a similarity of dense vectors; omit it."),
        (mode == BY_TEXT and search.ef_search is not None, "ef_search applies to the vector index; omit it."),
        (not weight > 0, "At least one of the weights of vector and text must be above 0."),
    ):
        if is_so:
            raise InvalidOption(sentence)


class Deadline:
    """The end of a request, `seconds` after it came, or when its client has gone.

    Every step of a search asks for the time that is left, so that no loop goes on after it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends_at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Return the seconds that are left, 0 after the end."""
        return max(self._ends_at - time.monotonic(), 0.0)

    def end(self) -> None:
        """End the request now, because nobody waits for its answer."""
        self._ends_at = 0.0
