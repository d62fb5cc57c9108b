# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Calls for collections: their descriptions, rows, items, generations and indexes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from vectormill.client.requests import Export, fill_path, given, make_key_header
from vectormill.client.sync.exports import ExportTransport, Results
from vectormill.collections import operations
from vectormill.collections.operations import (
    CollectionBody,
    CollectionDetail,
    DeleteAnswer,
    IndexBody,
    ItemAnswer,
    PutAnswer,
    RollbackAnswer,
)
from vectormill.runs import operations as run_operations
from vectormill.runs.operations import RunBody

# The number of keys in one request: commits to the collection are blocked while the API deletes them.
BATCH_KEYS: Final = 1000


class CollectionCalls(ExportTransport):
    """Calls for collections and their indexes. Rows are found with `search` and written by jobs.

    `include` of an export names parts of a row: `vector` (`score` or `output`, by the collection's kind),
    `metadata` and `text`; by default the first two.
    """

    def create_collection(
        self,
        name: str,
        *,
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        keep_text: bool | None = None,
        language: str | None = None,
        index_policy: str | None = None,
        index_options: Mapping[str, Any] | None = None,
    ) -> CollectionDetail:
        """Create an empty collection and return it.

        `options` are those of a job: dimensions, prompt, vector_type and so on.
        """
        body = {
            "name": name,
            "model": model,
            "options": dict(options) if options else None,
            "keep_text": keep_text,
            "language": language,
            "index_policy": index_policy,
            "index_options": dict(index_options) if index_options else None,
        }
        return self.ask(operations.CREATE, body=body)

    def collections(self) -> Iterator[CollectionBody]:
        """Yield all collections by name, page by page."""
        return self.pages(CollectionBody, operations.LIST)

    def collection(self, name: str, *, exact: bool = False) -> CollectionDetail:
        """Return a collection with all its details; `exact` counts its rows, which reads every row."""
        timeout = self.long_timeout if exact else self.short_timeout
        return self.ask(operations.SHOW, name, params={"exact": exact or None}, timeout=timeout)

    def change_collection(
        self, name: str, *, keep_text: bool | None = None, language: str | None = None
    ) -> CollectionDetail:
        """Change settings of a collection; arguments that are None keep their value."""
        body = {"keep_text": keep_text, "language": language}
        return self.ask(operations.CHANGE, name, body=body)

    def delete_collection(self, name: str, *, force: bool = False) -> None:
        """Delete a collection with all its rows.

        The API refuses while jobs or runs work on the collection, unless `force` is set, which cancels them.
        """
        self.ask(operations.DELETE, name, params={"force": force or None})

    def rollback_collection(self, name: str, *, allow_missing: bool = False) -> RollbackAnswer:
        """Make the previous generation live again.

        The run `run_id` of the answer encodes the rows put since the swap. The API refuses if texts of those
        rows are not kept, unless `allow_missing` is set; `num_missing_rows` counts these rows.
        """
        return self.ask(operations.ROLL_BACK, name, params={"allow_missing": allow_missing or None})

    def discard_generation(self, name: str, generation_id: int) -> None:
        """Discard a generation that is being built or is retired."""
        self.ask(operations.DISCARD, name, generation_id)

    def check_collection(self, name: str, *, sample: int | None = None) -> RunBody:
        """Start a run that checks a collection; its report has the findings (see `wait_run`).

        The run encodes `sample` of the texts again and compares the results.
        """
        body = {"kind": "check", "options": given({"sample": sample})}
        return self.ask(run_operations.START, name, body=body, headers=make_key_header(None))

    def index(self, collection: str) -> IndexBody:
        """Return a collection's indexes, what would be built now and why, and the progress of a build."""
        return self.ask(operations.SHOW_INDEX, collection)

    def set_index(
        self,
        collection: str,
        *,
        policy: str | None = None,
        m: int | None = None,
        ef_construction: int | None = None,
        workers: int | None = None,
        memory_bytes: int | None = None,
        filters: Sequence[str] | None = None,
        multi_vector_codes: int | None = None,
        bm25: bool | None = None,
        rebuild: bool = False,
        drop: bool = False,
    ) -> RunBody:
        """Change the indexes of a collection and return the run that builds and drops them.

        `policy` is auto, hnsw or none. `filters` lists all metadata fields that are to have an index. With 2
        `multi_vector_codes` the run turns multi-vectors into residual codes; with 0 new rows keep halves.
        `bm25` ranks words by BM25. Arguments that are None keep their value. `wait_run` follows the run.
        """
        body = {
            "policy": policy,
            "m": m,
            "ef_construction": ef_construction,
            "workers": workers,
            "memory_bytes": memory_bytes,
            "filters": None if filters is None else list(filters),
            "multi_vector_codes": multi_vector_codes,
            "bm25": bm25,
            "rebuild": rebuild or None,
            "drop": drop or None,
        }
        return self.ask(operations.CHANGE_INDEX, collection, body=body)

    def export_collection(
        self,
        name: str,
        target: str | Path | BinaryIO,
        format: str = "ndjson",
        *,
        include: Sequence[str] | None = None,
        after: str | None = None,
    ) -> int:
        """Stream a collection's rows, in the order of their keys, to a file. Return the number of bytes.

        After a lost connection, NDJSON continues after the last complete row, and Parquet starts again. A path
        gets the whole export or stays unchanged.
        """
        return self.write_export(self._describe_rows(name, format, include, after), target)

    def collection_rows(
        self, name: str, *, include: Sequence[str] | None = None, after: str | None = None
    ) -> Results[dict[str, Any]]:
        """Return the collection's rows, to iterate in constant memory or to fetch as a table.

        A row is `{"key", "embedding", "metadata", "text"}`, as far as included. Instead of the embedding,
        rows of scores have `score`, `label` and `probabilities`, and rows of records `output`.
        """

        def describe(format: str) -> Export:
            return self._describe_rows(name, format, include, after)

        return Results(self, describe)

    def _describe_rows(
        self, name: str, format: str, include: Sequence[str] | None, after: str | None
    ) -> Export:
        wanted = {"include": None if include is None else ",".join(include), "after": after}
        return Export(fill_path(operations.EXPORT.path, name), given(wanted), format)

    def put_item(
        self,
        collection: str,
        key: str,
        text: str,
        *,
        text_pair: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_seconds: float | None = None,
    ) -> PutAnswer:
        """Encode a text, or score a pair of texts, and store the result under the key.

        The answer is `{"key", "job", "is_searchable", "searchable_at"}`. The call waits at most
        `wait_seconds`, by default the API's own limit, until the item is searchable; the job continues after
        that.
        """
        return self.ask(
            operations.PUT_ITEM,
            collection,
            body={"text": text, "text_pair": text_pair, "metadata": metadata},
            params={"key": key, "wait_seconds": wait_seconds},
        )

    def get_item(self, collection: str, key: str, *, has_vector: bool = False) -> ItemAnswer:
        """Return the item under the key, with its score or output.

        The item has its `embedding` only if `has_vector` is set.
        """
        parameters = {"key": key, "include": "vector" if has_vector else None}
        return self.ask(operations.SHOW_ITEM, collection, params=parameters)

    def delete_item(self, collection: str, key: str) -> None:
        """Delete the item under the key; a missing key is not an error."""
        self.ask(operations.DELETE_ITEM, collection, params={"key": key})

    def delete_items(self, collection: str, keys: Iterable[str]) -> DeleteAnswer:
        """Delete the items under these keys, which are read as a stream.

        Return `{"num_keys", "num_deleted"}`, where `num_deleted` counts the keys that existed.
        """
        total: DeleteAnswer = {"num_keys": 0, "num_deleted": 0}
        rest = iter(keys)
        while batch := list(islice(rest, BATCH_KEYS)):
            answer = self.ask(operations.DELETE_ITEMS, collection, body={"keys": batch})
            total["num_keys"] += answer["num_keys"]
            total["num_deleted"] += answer["num_deleted"]
        return total
