"""Collections over HTTP: made, described, checked, deleted."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import Json, given, make_key_header, make_path
from vectormill.client.shapes import CollectionBody, CollectionDetail
from vectormill.runs import operations
from vectormill.runs.bodies import RunBody


class CollectionCalls(Transport):
    """Calls for collections themselves: rows are found with `search`, and written by jobs."""

    async def create_collection(
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
        return await self.call(
            CollectionDetail, "POST", "/v1/collections", json=given(body), is_repeatable=False
        )

    def collections(self) -> AsyncIterator[CollectionBody]:
        """Yield all collections by name, page by page."""
        return self.pages(CollectionBody, "/v1/collections", {})

    async def collection(self, name: str, *, exact: bool = False) -> CollectionDetail:
        """Everything about one; `exact` counts its rows, which reads each of them."""
        path = make_path("/v1/collections", name)
        timeout = self.long_timeout if exact else self.short_timeout
        return await self.call(
            CollectionDetail, "GET", path, params=given({"exact": True if exact else None}), timeout=timeout
        )

    async def change_collection(
        self, name: str, *, keep_text: bool | None = None, language: str | None = None
    ) -> CollectionDetail:
        """Other wishes; what is None stays as it is."""
        body = given({"keep_text": keep_text, "language": language})
        return await self.call(
            CollectionDetail,
            "PATCH",
            make_path("/v1/collections", name),
            json=body,
            timeout=self.long_timeout,
        )

    async def delete_collection(self, name: str, *, force: bool = False) -> None:
        """Delete it with all its rows. While jobs or runs work on it only with `force`, which cancels them."""
        path = make_path("/v1/collections", name)
        parameters = given({"force": True if force else None})
        await self.call(Json, "DELETE", path, params=parameters, timeout=self.long_timeout)

    async def check_collection(self, name: str, *, sample: int | None = None) -> RunBody:
        """Start a run that compares what the collection holds with what is so; its report tells, see `wait_run`."""
        body = {"kind": "check", "options": given({"sample": sample})}
        return await self.ask(operations.START, name, body=body, headers=make_key_header(None))
