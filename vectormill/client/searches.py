"""Searches over HTTP."""

from collections.abc import Iterable

from vectormill.client.transport import Json, Transport, given, make_path


class Matches(list[Json]):
    """What a search found, best first, as `{"key", "score", "metadata"}`.

    `num_rows_read` is None when an index was used; without one every row is read, and this is about how many there are.
    """

    num_rows_read: int | None = None


class SearchCalls(Transport):
    """Of what a collection holds."""

    def search(
        self,
        collection: str,
        text: str | None = None,
        *,
        embedding: Iterable[float] | None = None,
        limit: int = 10,
    ) -> Matches:
        """The nearest items, to a text or to a vector of the same space."""
        query = {
            "text": text,
            "embedding": list(embedding) if embedding is not None else None,
            "limit": limit,
        }
        path = make_path("/v1/collections", collection, "search")
        # Not repeated: the server itself waits for a worker, for its VECTORMILL_SEARCH_TIMEOUT_SECONDS.
        answer = self.call("POST", path, json=given(query), timeout=self.long_timeout, is_repeatable=False)
        matches = Matches(answer["data"])
        matches.num_rows_read = answer.get("num_rows_read")
        return matches
