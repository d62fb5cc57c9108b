"""Searching: what a visitor typed into the search box, as a search of the HTTP interface, with the same meaning."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from vectormill.search.bodies import SearchQuery
from vectormill.search.filter import read_filters
from vectormill.search.matches import Match
from vectormill.search.search import BY_VECTOR, METADATA, SEARCH_MODES, TEXT

MOST_RESULTS: Final = 100
FEW_RESULTS: Final = 10
# The limit of the form: a query string of more is refused by proxies.
MOST_CHARS: Final = 2000
_MOST_SHOWN_CHARS: Final = 600

Mode = Literal["vector", "text", "hybrid"]


@dataclass(frozen=True, slots=True)
class SearchForm:
    """The fields of the search form. Every line of `filters` must hold; `like` is a row's key, or empty."""

    text: str = ""
    like: str = ""
    mode: str = BY_VECTOR
    filters: str = ""
    limit: int = FEW_RESULTS

    @property
    def is_asked(self) -> bool:
        return bool(self.text.strip() or self.like)

    def to_query(self, *, has_texts: bool) -> SearchQuery:
        """Raise InvalidOption for a filter that is none."""
        lines = [line.strip() for line in self.filters.splitlines()]
        mode: Any = self.mode if self.mode in SEARCH_MODES else BY_VECTOR
        return SearchQuery(
            text=None if self.like else self.text.strip(),
            more_like=self.like or None,
            limit=max(1, min(self.limit, MOST_RESULTS)),
            filter=read_filters([line for line in lines if line], told_as="The filter"),
            mode=BY_VECTOR if self.like else mode,
            include=[METADATA, TEXT] if has_texts else [METADATA],
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """A result as a page shows it; `metadata` is JSON, and neither it nor the text is longer than a page bears."""

    place: int
    key: str
    score: str
    text: str | None
    metadata: str | None
    ranks: str | None


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """`refusal` says why there is none; `note` what the visitor should know of how the rows were found."""

    hits: list[Hit]
    seconds: float
    note: str | None = None
    refusal: str | None = None


def describe_hit(place: int, match: Match) -> Hit:
    return Hit(
        place=place,
        key=match.key,
        score=f"{match.score:.4f}",
        text=None if match.text is None else _cut(match.text),
        metadata=None if match.metadata is None else _cut(_write(match.metadata)),
        ranks=_tell_ranks(match),
    )


def _tell_ranks(match: Match) -> str | None:
    """Describe the ranks of a hybrid match: `1st by nearness, 3rd by words`."""
    ranks = [
        f"{name} {rank}"
        for name, rank in (("nearness", match.vector_rank), ("words", match.text_rank))
        if rank is not None
    ]
    return f"place by {', by '.join(ranks)}" if ranks else None


def _write(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[: _MOST_SHOWN_CHARS - 1]}…"
