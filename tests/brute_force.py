"""Brute force: what a search of a small collection finds, in plain NumPy. The specification of vectormill/search.

The numbers of rows and queries must be so coarse that sums in float32 are exact. Then rows that are equally near here
are so in Postgres too, and answers can be compared row for row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.metadata_filters import fits
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.search.search import BY_TEXT, FUSION_CONSTANT, Search
from vectormill.vectors.representations import Representations

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """A row as it is stored, with its vectors as they are compared: codes are restored."""

    key: str
    vectors: Representations
    metadata: dict[str, Any] | None
    text: str | None

    @property
    def passage(self) -> dict[str, Any] | None:
        return (self.metadata or {}).get("_passage")

    @property
    def group(self) -> tuple[str, str]:
        """Return the document of a passage; a row that is no passage is a document of its own."""
        return ("row", self.key) if self.passage is None else ("document", self.passage["document"])


@dataclass(frozen=True)
class Corpus:
    """All rows of a collection by key. `find_words` returns the scores of the rows whose kept text fits the words."""

    rows: Mapping[str, Row]
    compares_products: bool
    compares_signs: bool
    find_words: Callable[[str], Scores]
    _known: dict[tuple[str, int], Scores] = field(default_factory=dict)

    def score(self, output: str, query: Representations) -> Scores:
        """Return the score of each row that has one, by one output of a query that is never changed."""
        measure = {DENSE: self._compare, SPARSE: self._weigh, MULTI_VECTOR: self._measure_maxsim}[output]
        known = (output, id(query))
        if known not in self._known:
            self._known[known] = measure(query)
        return self._known[known]

    def _compare(self, query: Representations) -> Scores:
        """Return cosines, inner products, or the cosines of signs. A row without a direction has no cosine."""
        stored = np.array([row.vectors.dense for row in self.rows.values()], np.float64)
        own = query.dense.astype(np.float64)
        if self.compares_signs:
            stored, own = (np.where(each > 0, 1.0, -1.0) for each in (stored, own))
        scores = stored @ own
        if not self.compares_products:
            with np.errstate(invalid="ignore"):
                cosines = scores / np.sqrt((stored * stored).sum(axis=1) * (own @ own))
            scores = 1 - (1 - np.clip(cosines, -1, 1))  # pgvector returns the distance
        return self._name(scores, ~np.isnan(scores))

    def _weigh(self, query: Representations) -> Scores:
        """Return the inner products of sparse weights. A row without a common word has none."""
        own = dict(zip(query.indices.tolist(), query.weights.tolist(), strict=True))
        products = np.zeros(len(self.rows))
        for place, row in enumerate(self.rows.values()):
            pairs = zip(row.vectors.indices.tolist(), row.vectors.weights.tolist(), strict=True)
            products[place] = sum(own.get(word, 0.0) * weight for word, weight in pairs)
        return self._name(products, products > 0)

    def _measure_maxsim(self, query: Representations) -> Scores:
        """Return for each row the sum, over the query's tokens, of the largest product with any token of the row."""
        own = query.vectors.astype(np.float64)
        products = [row.vectors.vectors.astype(np.float64) @ own.T for row in self.rows.values()]
        sums = [each.max(axis=0).sum() if each.size else 0.0 for each in products]
        return self._name(np.array(sums), np.full(len(sums), True))

    def _name(self, scores: npt.NDArray[np.float64], has_score: npt.NDArray[np.bool_]) -> Scores:
        named = zip(self.rows, scores.tolist(), has_score.tolist(), strict=True)
        return {key: score for key, score, is_there in named if is_there}


@dataclass(frozen=True)
class Ranked:
    """The rows that a search ranks, and the page that is cut from them.

    `best` are their keys in order; a search by document has only the best row of each document there.

    `scores` has all rows that were ranked, and `ranks` their ranks in each ranking, from 1. `is_complete` says that no
    ranking ended too early to fill the page. `is_rounded` says that the order of equal scores is left to rounding.
    """

    scores: Scores
    ranks: Mapping[str, Mapping[str, int]]
    best: Sequence[str]
    page: Sequence[str]
    is_complete: bool
    is_rounded: bool


def rank(scores: Scores) -> list[str]:
    """Return the keys by descending score; rows of equal score are in the order of their keys."""
    return sorted(scores, key=lambda key: (-scores[key], key))


def list_depths(search: Search) -> list[int | None]:
    """Return how many rows of each ranking a search may have read when it ends; None for all.

    A search by one ranking finds what it finds among all rows. Of several rankings, and of the candidates of MaxSim,
    a part is read whose size follows from the page: 4 times the smallest of 25, 50, 100, … that holds it. If these
    have too few documents, 32 times as many are read, and finally all.
    """
    if search.num_rankings < (1 if MULTI_VECTOR in search.outputs else 2):
        return [None]
    tier = 25
    while tier < search.num_wanted:
        tier *= 2
    return [4 * tier, 32 * tier, None] if search.by_document else [4 * tier]


def find(corpus: Corpus, search: Search, query: Representations | None, depth: int | None) -> Ranked:
    """Return what the search finds if each ranking has at most `depth` rows. `query` is that of the row it is like."""
    left = {key for key in corpus.rows if admits(corpus, search, key)}

    def leave(scores: Scores) -> Scores:
        return {key: score for key, score in scores.items() if key in left}

    weights: dict[str, float] = {}
    rankings: dict[str, Scores] = {}
    if DENSE in search.ranked_outputs:
        rankings["vector"], weights["vector"] = leave(corpus.score(DENSE, given(query))), search.vector_weight
    if SPARSE in search.ranked_outputs:
        rankings["sparse"], weights["sparse"] = (
            leave(corpus.score(SPARSE, given(query))),
            search.sparse_weight,
        )
    if search.reads_words:
        rankings["text"], weights["text"] = leave(corpus.find_words(search.words or "")), search.text_weight
    is_cut = depth is not None and any(len(scores) > depth for scores in rankings.values())
    ranks = {
        name: {key: place + 1 for place, key in enumerate(rank(scores)[:depth])}
        for name, scores in rankings.items()
    }
    if len(rankings) == 1:
        ((name, scores),) = rankings.items()
        scores = {key: scores[key] for key in ranks[name]}
    else:
        scores = fuse(ranks, weights)
    is_rounded = has_near_ties(scores, ranks)
    if MULTI_VECTOR in search.outputs:
        maxsim = leave(corpus.score(MULTI_VECTOR, given(query)))
        candidates = rank(scores) if rankings else list(maxsim)
        is_cut |= depth is not None and len(candidates) > depth
        scores = {key: maxsim[key] for key in candidates[:depth]}
    best = [key for key in rank(scores) if search.min_score is None or scores[key] >= search.min_score]
    if search.by_document:
        best = take_first(best, lambda key: corpus.rows[key].group)
    page = best[search.offset : search.num_wanted]
    return Ranked(scores, ranks, best, page, len(page) == search.limit or not is_cut, is_rounded)


def given(query: Representations | None) -> Representations:
    assert query is not None, "a search by vectors has a query"
    return query


def admits(corpus: Corpus, search: Search, key: str) -> bool:
    """Return whether the filter fits the row, and the row is not the one that others are to be like.

    By document the whole document of that row is left out.
    """
    row = corpus.rows[key]
    if search.condition is not None and not fits(search.condition, row.metadata or {}):
        return False
    if search.like is None:
        return True
    return row.group != corpus.rows[search.like].group if search.by_document else key != search.like


def fuse(ranks: Mapping[str, Mapping[str, int]], weights: Mapping[str, float]) -> Scores:
    """Return the sums of weight / (60 + rank) over the rankings that have a row."""
    scores: dict[str, float] = {}
    for name, places in ranks.items():
        for key, place in places.items():
            scores[key] = scores.get(key, 0.0) + weights[name] / (FUSION_CONSTANT + place)
    return scores


def has_near_ties(scores: Scores, ranks: Mapping[str, Mapping[str, int]]) -> bool:
    """Return whether sums of three numbers are so near to others that the order of addition decides theirs."""
    sums = {key for key in scores if len(ranks) > 2 and all(key in places for places in ranks.values())}
    return any(
        scores[first] - scores[second] < 1e-12 and sums & {first, second}
        for first, second in pairwise(rank(scores))
    )


def take_first(keys: Iterable[str], name_group: Callable[[str], Any]) -> list[str]:
    first: dict[Any, str] = {}
    for key in keys:
        first.setdefault(name_group(key), key)
    return list(first.values())


def needs_query(search: Search) -> bool:
    """Return whether a search compares vectors that come beside it."""
    return search.like is None and (search.mode != BY_TEXT or MULTI_VECTOR in search.outputs)
