# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Sources over HTTP, pushes to them, and tables whose changes are followed."""

from collections.abc import Iterable, Mapping
from typing import Any

from vectormill.client.requests import NDJSON_HEADERS, Json, given, make_key_header, make_path
from vectormill.client.shapes import FollowingBody, PushBody, SourceBody, SourceCheckBody
from vectormill.client.sync import flow
from vectormill.client.sync.transport import Transport
from vectormill.files.ndjson import ItemJson


class SourceCalls(Transport):
    """Calls for sources: where the texts of collections come from."""

    def set_source(
        self,
        collection: str,
        kind: str,
        options: Mapping[str, Any] | None = None,
        *,
        split: Mapping[str, Any] | None = None,
        check: bool = True,
    ) -> SourceBody:
        """Set the collection's source, after a look at its first rows unless `check` is False.

        `kind` is sql, files, tree, push or own_texts; its options, and `split`, are those of docs/SOURCES.md.
        """
        body = {"kind": kind, "options": dict(options or {}), "split": dict(split or {})}
        path = make_path("/v1/collections", collection, "source")
        parameters = {"check": "true" if check else "false"}
        return self.call(SourceBody, "PUT", path, json=body, params=parameters, timeout=self.long_timeout)

    def source(self, collection: str) -> SourceBody:
        return self.call(SourceBody, "GET", make_path("/v1/collections", collection, "source"))

    def check_source(self, collection: str) -> SourceCheckBody:
        """Read the first rows of the source now: their number, three of them, and errors in single rows."""
        path = make_path("/v1/collections", collection, "source", "check")
        return self.call(SourceCheckBody, "POST", path, timeout=self.long_timeout)

    def delete_source(self, collection: str) -> None:
        """The collection follows nothing any more; its rows stay."""
        self.call(Json, "DELETE", make_path("/v1/collections", collection, "source"))

    def push(
        self,
        collection: str,
        items: Iterable[ItemJson],
        *,
        complete: bool = False,
        gzip: bool = False,
        idempotency_key: str | None = None,
    ) -> PushBody:
        """Streams rows to a collection whose source is a push, and answers `{"run", "num_items", …}`.

        `complete` says that these are all rows: those of the collection that are not among them are deleted. When
        `items` can be iterated again, a lost connection is survived, as by `submit`.
        """
        headers = NDJSON_HEADERS | make_key_header(idempotency_key)
        if gzip:
            headers["Content-Encoding"] = "gzip"
        return self.call(
            PushBody,
            "POST",
            make_path("/v1/collections", collection, "push"),
            params={"complete": "true" if complete else "false"},
            headers=headers,
            make_body=lambda: flow.encode_body(items, gzip=gzip),
            timeout=self.long_timeout,
            is_repeatable=flow.can_repeat(items),
        )

    def follow(
        self, collection: str, *, table: str | None = None, key_column: str | None = None
    ) -> FollowingBody:
        """Note every change of the source's table from now on; without names, those of the query."""
        path = make_path("/v1/collections", collection, "source", "follow")
        return self.call(FollowingBody, "POST", path, json=given({"table": table, "key_column": key_column}))

    def unfollow(self, collection: str) -> FollowingBody:
        """Remove the triggers; rows of the collection stay."""
        return self.call(
            FollowingBody, "POST", make_path("/v1/collections", collection, "source", "unfollow")
        )

    def following(self, collection: str) -> FollowingBody:
        """Return the table that it follows, and how many of its changes wait."""
        return self.call(
            FollowingBody, "GET", make_path("/v1/collections", collection, "source", "following")
        )
