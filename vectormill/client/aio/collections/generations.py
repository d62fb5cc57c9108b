"""Generations over HTTP: go back to the one that was live before, or give one up."""

from vectormill.client.aio.transport import Transport
from vectormill.client.requests import Json, make_path
from vectormill.client.shapes import RollbackAnswer


class GenerationCalls(Transport):
    """Of the builds of a collection; `collection` lists them."""

    async def rollback_collection(self, name: str) -> RollbackAnswer:
        """Makes the generation live that was live before; twice, and all is as it was.

        `num_newer_rows` of the answer says how many rows were put since, and are missing now.
        """
        # Never repeated by itself: a second one would undo the first.
        path = make_path("/v1/collections", name, "rollback")
        return await self.call(RollbackAnswer, "POST", path, timeout=self.long_timeout, is_repeatable=False)

    async def discard_generation(self, name: str, generation_id: int) -> None:
        """Gives up one that is being built, or is retired."""
        path = make_path("/v1/collections", name, "generations", str(generation_id))
        await self.call(Json, "DELETE", path, timeout=self.long_timeout, is_repeatable=False)
