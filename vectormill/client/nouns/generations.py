"""Generations over HTTP: go back to the one that was live before, or give one up."""

from vectormill.client.transport import Json, Transport, make_path


class GenerationCalls(Transport):
    """Of the builds of a collection; `collection` lists them."""

    def rollback_collection(self, name: str) -> Json:
        """Makes the generation live that was live before; twice, and all is as it was.

        `num_newer_rows` of the answer says how many rows were put since, and are missing now.
        """
        # Never repeated by itself: a second one would undo the first.
        path = make_path("/v1/collections", name, "rollback")
        return self.call("POST", path, timeout=self.long_timeout, is_repeatable=False)

    def discard_generation(self, name: str, generation_id: int) -> None:
        """Gives up one that is being built, or is retired."""
        path = make_path("/v1/collections", name, "generations", str(generation_id))
        self.call("DELETE", path, timeout=self.long_timeout, is_repeatable=False)
