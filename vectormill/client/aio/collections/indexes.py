"""Indexes of collections over HTTP."""

from collections.abc import Sequence

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import given
from vectormill.collections.indexes import operations
from vectormill.collections.indexes.bodies import IndexBody
from vectormill.runs.bodies import RunBody


class IndexCalls(Transport):
    """Calls for the indexes of a collection, which make searches fast."""

    async def index(self, collection: str) -> IndexBody:
        """Return the indexes that there are, what would be built now and why, and how far a build is."""
        return await self.ask(operations.SHOW, collection)

    async def set_index(
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
        """Keep what is wanted, and answer the run that builds and drop; `wait_run` follows it.

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
        return await self.ask(operations.CHANGE, collection, body=given(body))
