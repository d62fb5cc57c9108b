"""Collections over HTTP: what there is, and what each is made of."""

from collections.abc import Iterator

from vectormill.client.transport import Json, Transport, given, make_path


class CollectionCalls(Transport):
    """Of collections as things: their rows are searched with `search`, and written by jobs."""

    def collections(self) -> Iterator[Json]:
        """All collections by name, page by page."""
        return self.pages("/v1/collections", {})

    def collection(self, name: str, *, exact: bool = False) -> Json:
        """Everything about one; `exact` counts its rows, which reads each of them."""
        path = make_path("/v1/collections", name)
        timeout = self.long_timeout if exact else self.short_timeout
        return self.call("GET", path, params=given({"exact": True if exact else None}), timeout=timeout)
