# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Collections over HTTP: their descriptions, rows, items, generations and indexes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

from vectormill.client.requests import fill_path, given, make_key_header
from vectormill.client.sync.exports import Export, ExportTransport, Results
from vectormill.collections import operations
from vectormill.collections.bodies import (
    CollectionBody,
    CollectionDetail,
    DeleteAnswer,
    IndexBody,
    ItemAnswer,
    PutAnswer,
    RollbackAnswer,
)
from vectormill.runs import operations as run_operations
from vectormill.runs.bodies import RunBody

# The keys of one request; commits into the collection wait while the API deletes.
BATCH_KEYS: Final = 1000


class CollectionCalls(ExportTransport):
    """Calls for collections themselves and their indexes: rows are found with `search`, and written by jobs.

    `include` of an export names parts of a row: `vector` (`score` or `output`, by the collection's kind), `metadata`
    and `text`; by default the first two.
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
        """Return a collection without rows. `options` are those of a job: dimensions, prompt, vector_type and so on."""
        body = {
            "name": name,
            "model": model,
            "options": dict(options) if options else None,
            "keep_text": keep_text,
            "language": language,
            "index_policy": index_policy,
            "index_options": dict(index_options) if index_options else None,
        }
        return self.ask(operations.CREATE, body=given(body))

    def collections(self) -> Iterator[CollectionBody]:
        """Yield all collections by name, page by page."""
        return self.pages(CollectionBody, operations.LIST.path, {})

    def collection(self, name: str, *, exact: bool = False) -> CollectionDetail:
        """Return everything about one collection; `exact` counts its rows, which reads each of them."""
        timeout = self.long_timeout if exact else self.short_timeout
        return self.ask(operations.SHOW, name, params=given({"exact": exact or None}), timeout=timeout)

    def change_collection(
        self, name: str, *, keep_text: bool | None = None, language: str | None = None
    ) -> CollectionDetail:
        """Change what is not None."""
        body = given({"keep_text": keep_text, "language": language})
        return self.ask(operations.CHANGE, name, body=body, timeout=self.long_timeout)

    def delete_collection(self, name: str, *, force: bool = False) -> None:
        """Delete it with all its rows. While jobs or runs work on it only with `force`, which cancels them."""
        parameters = given({"force": force or None})
        self.ask(operations.DELETE, name, params=parameters, timeout=self.long_timeout)

    def rollback_collection(self, name: str, *, allow_missing: bool = False) -> RollbackAnswer:
        """Make the generation live that was live before; the run `run_id` of the answer carries what was put since.

        Refused where texts put since are not kept, unless with `allow_missing`; `num_missing_rows` counts them.
        """
        parameters = given({"allow_missing": allow_missing or None})
        return self.ask(operations.ROLL_BACK, name, params=parameters, timeout=self.long_timeout)

    def discard_generation(self, name: str, generation_id: int) -> None:
        """Give up one that is being built, or is retired."""
        self.ask(operations.DISCARD, name, generation_id, timeout=self.long_timeout)

    def check_collection(self, name: str, *, sample: int | None = None) -> RunBody:
        """Start a run that compares what the collection holds with what is so; its report tells, see `wait_run`."""
        body = {"kind": "check", "options": given({"sample": sample})}
        return self.ask(run_operations.START, name, body=body, headers=make_key_header(None))

    def index(self, collection: str) -> IndexBody:
        """Return the indexes that there are, what would be built now and why, and how far a build is."""
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
        rebuild: bool = False,
        drop: bool = False,
    ) -> RunBody:
        """Change the wanted indexes, and return the run that builds and drops them; `wait_run` follows it.

        `policy` is auto, hnsw or none. `filters` are all fields of the metadata that have an index; what is None stays
        as it is.
        """
        body = {
            "policy": policy,
            "m": m,
            "ef_construction": ef_construction,
            "workers": workers,
            "memory_bytes": memory_bytes,
            "filters": None if filters is None else list(filters),
            "rebuild": rebuild or None,
            "drop": drop or None,
        }
        return self.ask(operations.CHANGE_INDEX, collection, body=given(body))

    def export_collection(
        self,
        name: str,
        target: str | Path | BinaryIO,
        format: str = "ndjson",
        *,
        include: Sequence[str] | None = None,
        after: str | None = None,
    ) -> int:
        """Stream a collection's rows, in the order of their keys, into a file, and return the number of bytes.

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
        """Encode a text, or scores a pair, and keep the result under the key.

        The answer is `{"key", "job", "is_searchable", "searchable_at"}`.
        Waits so long for it to be searchable, else as long as the API has it set; the job goes on all the same.
        """
        return self.ask(
            operations.PUT_ITEM,
            collection,
            key,
            body=given({"text": text, "text_pair": text_pair, "metadata": metadata}),
            params=given({"wait_seconds": wait_seconds}),
            timeout=self.long_timeout,
        )

    def get_item(self, collection: str, key: str, *, has_vector: bool = False) -> ItemAnswer:
        """Return what the collection has under the key, with a score or output; `embedding` only when asked for."""
        parameters = {"include": "vector"} if has_vector else {}
        return self.ask(operations.SHOW_ITEM, collection, key, params=parameters)

    def delete_item(self, collection: str, key: str) -> None:
        """Remove what is under the key, whether or not there is anything."""
        self.ask(operations.DELETE_ITEM, collection, key)

    def delete_items(self, collection: str, keys: Iterable[str]) -> DeleteAnswer:
        """Remove what is under these keys, read as a stream: `{"num_keys", "num_deleted"}`, of which the latter
        were there.
        """
        total: DeleteAnswer = {"num_keys": 0, "num_deleted": 0}
        rest = iter(keys)
        while batch := list(islice(rest, BATCH_KEYS)):
            answer = self.ask(
                operations.DELETE_ITEMS, collection, body={"keys": batch}, timeout=self.long_timeout
            )
            total["num_keys"] += answer["num_keys"]
            total["num_deleted"] += answer["num_deleted"]
        return total
