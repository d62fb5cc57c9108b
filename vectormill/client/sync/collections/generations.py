# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Generations over HTTP: go back to the one that was live before, or give one up."""

from vectormill.client.requests import Json, given, make_path
from vectormill.client.shapes import RollbackAnswer
from vectormill.client.sync.transport import Transport


class GenerationCalls(Transport):
    """Calls for the builds of a collection; `collection` lists them."""

    def rollback_collection(self, name: str, *, allow_missing: bool = False) -> RollbackAnswer:
        """Make the generation live that was live before; the run `run_id` of the answer carries what was put since.

        Refused where texts put since are not kept, unless with `allow_missing`; `num_missing_rows` counts them.
        """
        # Never repeated by itself: a second one would undo the first.
        path = make_path("/v1/collections", name, "rollback")
        parameters = given({"allow_missing": True if allow_missing else None})
        return self.call(
            RollbackAnswer,
            "POST",
            path,
            params=parameters,
            timeout=self.long_timeout,
            is_repeatable=False,
        )

    def discard_generation(self, name: str, generation_id: int) -> None:
        """Give up one that is being built, or is retired."""
        path = make_path("/v1/collections", name, "generations", str(generation_id))
        self.call(Json, "DELETE", path, timeout=self.long_timeout, is_repeatable=False)
