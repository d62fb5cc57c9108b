"""Collections over HTTP: made, described, exported, checked, deleted."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from vectormill.client.transport import RETRIED_STATUS, RETRY_PAUSES, Json, Transport, given, make_path
from vectormill.files.ndjson import split_lines
from vectormill.files.replacement import open_replacement
from vectormill.problems import ApiError, ApiUnreachable


class Keyed(msgspec.Struct):
    """Of a line the key alone; its numbers are passed over."""

    key: str


class CollectionCalls(Transport):
    """Of collections as things: their rows are searched with `search`, and written by jobs."""

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
    ) -> Json:
        """A collection without rows. `options` are those of a job: dimensions, prompt, vector_type and so on."""
        body = {
            "name": name,
            "model": model,
            "options": dict(options) if options else None,
            "keep_text": keep_text,
            "language": language,
            "index_policy": index_policy,
            "index_options": dict(index_options) if index_options else None,
        }
        return self.call("POST", "/v1/collections", json=given(body), is_repeatable=False)

    def collections(self) -> Iterator[Json]:
        """All collections by name, page by page."""
        return self.pages("/v1/collections", {})

    def collection(self, name: str, *, exact: bool = False) -> Json:
        """Everything about one; `exact` counts its rows, which reads each of them."""
        path = make_path("/v1/collections", name)
        timeout = self.long_timeout if exact else self.short_timeout
        return self.call("GET", path, params=given({"exact": True if exact else None}), timeout=timeout)

    def change_collection(
        self, name: str, *, keep_text: bool | None = None, language: str | None = None
    ) -> Json:
        """Other wishes; what is None stays as it is."""
        body = given({"keep_text": keep_text, "language": language})
        return self.call("PATCH", make_path("/v1/collections", name), json=body, timeout=self.long_timeout)

    def delete_collection(self, name: str, *, force: bool = False) -> None:
        """Deletes it with all its rows. While jobs or runs work on it only with `force`, which cancels them."""
        path = make_path("/v1/collections", name)
        parameters = given({"force": True if force else None})
        self.call("DELETE", path, params=parameters, timeout=self.long_timeout)

    def check_collection(self, name: str, *, sample: int | None = None) -> Json:
        """Starts a run that compares what the collection holds with what is so; its report tells, see `wait_run`."""
        path = make_path("/v1/collections", name, "runs")
        body = {"kind": "check", "options": given({"sample": sample})}
        return self.call("POST", path, json=body, is_repeatable=False)

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

        `include` names parts of a row: `vector` (`score` or `output`, as the collection's kind is), `metadata`, `text`;
        else the first two.

        NDJSON that loses its connection goes on behind the last row that came whole. Parquet cannot: without its end a
        file is none, so that it begins anew, and only in a path. A path gets the whole export or is left as it was.
        """
        if isinstance(target, str | Path):
            if format == "ndjson":
                with open_replacement(Path(target)) as file:
                    return self.export_collection(name, file, format, include=include, after=after)
            return self._export_whole(name, Path(target), format, include, after)
        num_bytes = 0
        parts: Iterator[bytes]
        if format == "ndjson":
            parts = (line + b"\n" for line in self._resumed_lines(name, include, after))
        else:
            parts = self._export_parts_of(name, format, include, after, {})
        for part in parts:
            target.write(part)
            num_bytes += len(part)
        return num_bytes

    def collection_rows(
        self, name: str, *, include: Sequence[str] | None = None, after: str | None = None
    ) -> Iterator[Json]:
        """Every row as `{"key", "embedding", "metadata", "text"}` of what is included, in constant memory.

        Of scores with `score`, `label` and `probabilities`, of records with `output`, instead of the embedding.
        """
        for line in self._resumed_lines(name, include, after):
            yield msgspec.json.decode(line)

    def _export_whole(
        self, name: str, path: Path, format: str, include: Sequence[str] | None, after: str | None
    ) -> int:
        for pause in (*RETRY_PAUSES, None):
            try:
                with open_replacement(path) as file:
                    return self.export_collection(name, file, format, include=include, after=after)
            except ApiUnreachable:
                if pause is None:
                    raise
                self.pause_for(pause)
        raise AssertionError("the last attempt returns or raises")

    def _resumed_lines(self, name: str, include: Sequence[str] | None, after: str | None) -> Iterator[bytes]:
        """Whole lines of all rows. A lost connection is made again for as long as each brings some more."""
        answered: dict[str, str] = {}
        pauses = iter(RETRY_PAUSES)
        while True:
            try:
                for line in split_lines(self._export_parts_of(name, "ndjson", include, after, answered)):
                    after = msgspec.json.decode(line, type=Keyed).key
                    yield line
                    pauses = iter(RETRY_PAUSES)
                return
            except (ApiUnreachable, ApiError) as error:
                pause = next(pauses, None)
                is_passing = isinstance(error, ApiUnreachable) or error.status in RETRIED_STATUS
                if pause is None or not answered or not is_passing:
                    raise
                self.pause_for(pause)

    def _export_parts_of(
        self,
        name: str,
        format: str,
        include: Sequence[str] | None,
        after: str | None,
        answered: dict[str, str],
    ) -> Iterator[bytes]:
        """The body as it comes. `answered` gets the generation that it is of, and names it when it has it already."""
        parameters = {
            "format": format,
            "include": None if include is None else ",".join(include),
            "after": after,
            "generation": answered.get("generation"),
        }
        path = make_path("/v1/collections", name, "export")
        with self.answered("GET", path, params=given(parameters), timeout=self.long_timeout) as response:
            answered["generation"] = response.headers["Vectormill-Generation"]
            yield from response.iter_bytes()
