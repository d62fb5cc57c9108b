"""Matches: what a search found, as a list, and what the API says of the search. Asks nothing."""

from typing import Any

from vectormill.client.shapes import MatchBody, SearchAnswer


class Matches(list[MatchBody]):
    """The matches of a search, best first, as `{"key", "score", "metadata"}` and what else was asked for.

    `num_rows_read` is None when an index was used; without one every row is read, and this is about how many there are.
    `next_offset` begins the next page, if there is one. `repeated_because` says why a search was repeated exactly after
    its index had given too little.
    """

    num_rows_read: int | None = None
    next_offset: int | None = None
    repeated_because: str | None = None

    @classmethod
    def from_answer(cls, answer: SearchAnswer | dict[str, Any]) -> "Matches":
        matches = cls(answer["data"])
        matches.num_rows_read = answer.get("num_rows_read")
        matches.next_offset = answer.get("next_offset")
        matches.repeated_because = answer.get("repeated_because")
        return matches
