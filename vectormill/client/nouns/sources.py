"""Sources over HTTP, pushes to them, and tables whose changes are followed."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vectormill.client.transport import Json, Transport, given, make_path
from vectormill.files.ndjson import ItemJson, compress_parts, encode_parts


class SourceCalls(Transport):
    """Of where the texts of collections come from."""

    def set_source(
        self,
        collection: str,
        kind: str,
        options: Mapping[str, Any] | None = None,
        *,
        split: Mapping[str, Any] | None = None,
        check: bool = True,
    ) -> Json:
        """Sets the collection's source, after a look at its first rows unless `check` is False.

        `kind` is sql, files, tree, push or own_texts; its options, and `split`, are those of docs/SOURCES.md.
        """
        body = {"kind": kind, "options": dict(options or {}), "split": dict(split or {})}
        path = make_path("/v1/collections", collection, "source")
        parameters = {"check": "true" if check else "false"}
        return self.call("PUT", path, json=body, params=parameters, timeout=self.long_timeout)

    def source(self, collection: str) -> Json:
        return self.call("GET", make_path("/v1/collections", collection, "source"))

    def check_source(self, collection: str) -> Json:
        """What a look at the first rows finds now: how many, three of them, and what is wrong with single ones."""
        path = make_path("/v1/collections", collection, "source", "check")
        return self.call("POST", path, timeout=self.long_timeout)

    def delete_source(self, collection: str) -> None:
        """The collection follows nothing any more; its rows stay."""
        self.call("DELETE", make_path("/v1/collections", collection, "source"))

    def push(
        self, collection: str, items: Iterable[ItemJson], *, complete: bool = False, gzip: bool = False
    ) -> Json:
        """Streams rows to a collection whose source is a push, and answers `{"run", "num_items", …}`.

        `complete` says that these are all rows: those of the collection that are not among them are deleted. Not
        repeated when the connection breaks: nothing was written then.
        """
        headers = {"Content-Type": "application/x-ndjson"} | ({"Content-Encoding": "gzip"} if gzip else {})

        def body() -> Iterator[bytes]:
            parts = encode_parts(items)
            return compress_parts(parts) if gzip else parts

        return self.call(
            "POST",
            make_path("/v1/collections", collection, "push"),
            params={"complete": "true" if complete else "false"},
            headers=headers,
            content=body,
            timeout=self.long_timeout,
            is_repeatable=False,
        )

    def follow(self, collection: str, *, table: str | None = None, key_column: str | None = None) -> Json:
        """Notes every change of the source's table from now on; without names, those of the query."""
        path = make_path("/v1/collections", collection, "source", "follow")
        return self.call("POST", path, json=given({"table": table, "key_column": key_column}))

    def unfollow(self, collection: str) -> Json:
        """Removes the triggers; rows of the collection stay."""
        return self.call("POST", make_path("/v1/collections", collection, "source", "unfollow"))

    def following(self, collection: str) -> Json:
        """The table that it follows, and how many of its changes wait."""
        return self.call("GET", make_path("/v1/collections", collection, "source", "following"))
