# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""A collection's rows over HTTP, in the order of their keys: into a file, one by one, or as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from vectormill.client.requests import given, make_path
from vectormill.client.sync.exports import Export, ExportTransport
from vectormill.client.sync.results import Results


class CollectionExportCalls(ExportTransport):
    """Calls that export the rows of a collection. `include` names parts of a row.

    Parts are `vector` (`score` or `output`, by the collection's kind), `metadata` and `text`; by default the first two.
    """

    def export_collection(
        self,
        name: str,
        target: str | Path | BinaryIO,
        format: str = "ndjson",
        *,
        include: Sequence[str] | None = None,
        after: str | None = None,
    ) -> int:
        """Streams a collection's rows, in the order of their keys, into a file; the number of bytes.

        NDJSON that loses its connection goes on behind the last row that came whole. Parquet cannot: without its end a
        file is none, so that it begins anew, and only in a path. A path gets the whole export or is left as it was.
        """
        return self.write_export(self._describe_rows(name, format, include, after), target)

    def collection_rows(
        self, name: str, *, include: Sequence[str] | None = None, after: str | None = None
    ) -> Results[dict[str, Any]]:
        """Return every row as `{"key", "embedding", "metadata", "text"}` of what is included, in constant memory.

        Of scores with `score`, `label` and `probabilities`, of records with `output`, instead of the embedding.
        """

        def describe(format: str) -> Export:
            return self._describe_rows(name, format, include, after)

        return Results(self, describe)

    def _describe_rows(
        self, name: str, format: str, include: Sequence[str] | None, after: str | None
    ) -> Export:
        wanted = {"include": None if include is None else ",".join(include), "after": after}
        return Export(make_path("/v1/collections", name, "export"), given(wanted), format)
