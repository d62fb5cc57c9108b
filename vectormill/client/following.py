"""Following tables over HTTP."""

from vectormill.client.transport import Json, Transport, given, make_path


class FollowCalls(Transport):
    """Of tables whose changes are encoded within seconds."""

    def follow(self, collection: str, *, table: str | None = None, key_column: str | None = None) -> Json:
        """Notes every change of the source's table from now on; without names, those of the query."""
        path = make_path("/v1/collections", collection, "source", "follow")
        return self.call("POST", path, json=given({"table": table, "key_column": key_column}))

    def unfollow(self, collection: str) -> Json:
        """Removes the triggers; rows of the collection stay."""
        return self.call("POST", make_path("/v1/collections", collection, "source", "unfollow"))

    def following(self, collection: str) -> Json:
        """The table that it follows, and how many of its changes wait."""
        return self.call("GET", make_path("/v1/collections", collection, "source", "following"))
