"""Items of a collection over HTTP, one by one."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import Json, given, make_path
from vectormill.client.shapes import DeleteAnswer, ItemAnswer, PutAnswer

# The keys of one request; commits into the collection wait while the API deletes.
BATCH_KEYS: Final = 1000


class ItemCalls(Transport):
    """Calls for single items of a collection, by key."""

    async def put_item(
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
        path = make_path("/v1/collections", collection, "items", key)
        return await self.call(
            PutAnswer,
            "PUT",
            path,
            json=given({"text": text, "text_pair": text_pair, "metadata": metadata}),
            params=given({"wait_seconds": wait_seconds}),
            timeout=self.long_timeout,
        )

    async def get_item(self, collection: str, key: str, *, has_vector: bool = False) -> ItemAnswer:
        """Return what the collection has under the key, with a score or output; `embedding` only when asked for."""
        path = make_path("/v1/collections", collection, "items", key)
        return await self.call(ItemAnswer, "GET", path, params={"include": "vector"} if has_vector else {})

    async def delete_item(self, collection: str, key: str) -> None:
        """Remove what is under the key, whether or not there is anything."""
        await self.call(Json, "DELETE", make_path("/v1/collections", collection, "items", key))

    async def delete_items(self, collection: str, keys: Iterable[str]) -> DeleteAnswer:
        """Remove what is under these keys, read as a stream: `{"num_keys", "num_deleted"}`, of which the latter
        were there.
        """
        path = make_path("/v1/collections", collection) + "/items:delete"
        total: DeleteAnswer = {"num_keys": 0, "num_deleted": 0}
        rest = iter(keys)
        while batch := list(islice(rest, BATCH_KEYS)):
            answer = await self.call(
                DeleteAnswer, "POST", path, json={"keys": batch}, timeout=self.long_timeout
            )
            total["num_keys"] += answer["num_keys"]
            total["num_deleted"] += answer["num_deleted"]
        return total
