"""Rounds: which searches one statement answers, and how they are told apart again. Runs nothing.

Beside the search of a few thousand rows, a statement, its plan and its way there and back cost as much again.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vectormill.search.search import BY_VECTOR, VECTOR, Search

# Limits of one statement: vectors of 100 kB as text, and some thousand rows.
MOST_TOGETHER: Final = 32
# More rows than these are wanted one search at a time.
MOST_ROWS: Final = 100
# Without an index: of a larger table Postgres lets several processes read a part each (min_parallel_table_scan_size),
# but not within a lateral join.
MOST_ROWS_READ: Final = 10_000

SearchWithVector = tuple[Search, npt.NDArray[np.float32] | None]


def find_company(search: Search) -> Hashable | None:
    """Return what searches that one statement answers have in common; None for one that is always alone.

    Also how many rows they want: an index that looks for more rows may find nearer ones as well.
    """
    is_bare = search.mode == BY_VECTOR and search.like is None and not search.by_document
    if not is_bare or VECTOR in search.include or search.num_wanted > MOST_ROWS:
        return None
    # By its words, for 1 == True.
    return search.num_wanted, search.ef_search, search.include, repr(search.condition)


def divide_into_rounds(searches: Sequence[Search]) -> list[list[int]]:
    """The places of all searches, those together that one statement answers."""
    rounds: list[list[int]] = []
    open_rounds: dict[Hashable, list[int]] = {}
    for place, search in enumerate(searches):
        company = find_company(search)
        together = None if company is None else open_rounds.get(company)
        if together is None or len(together) == MOST_TOGETHER:
            together = []
            rounds.append(together)
            if company is not None:
                open_rounds[company] = together
        together.append(place)
    return rounds


def cut_pages(searches: Sequence[Search], rows: Iterable[Any]) -> list[list[Any]]:
    """The rows of each search's own page, from those of all, which have a `place` from 1 on and are in order."""
    of_place: Mapping[int, list[Any]] = {place: [] for place in range(1, len(searches) + 1)}
    for row in rows:
        of_place[row.place].append(row)
    return [
        found[search.offset : search.num_wanted]
        for search, found in zip(searches, of_place.values(), strict=True)
    ]
