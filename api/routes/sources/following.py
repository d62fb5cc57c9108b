"""Following over HTTP: a table of our own Postgres keeps its collection true by triggers."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter
from sqlalchemy import Connection

from api.bodies.sources.following import FollowingBody, FollowRequest
from api.dependencies import CollectionName, Resources, ResourcesDependency
from vectormill.db.short_locks import act_in_short_locks
from vectormill.domain.errors import InvalidOption
from vectormill.sources.followed_tables import find_following, follow_table, unfollow_table

router = APIRouter(tags=["sources"])

# A request does not wait longer for the transactions that write the table.
PATIENCE_SECONDS: Final = 10.0


@router.get("/v1/collections/{name}/source/following")
def get_following(name: CollectionName, resources: ResourcesDependency) -> FollowingBody:
    """The table that the collection follows, and what of it waits."""
    with resources.engine.connect() as connection:
        return FollowingBody.of(name, find_following(connection, name))


@router.post("/v1/collections/{name}/source/follow")
def post_follow(name: CollectionName, body: FollowRequest, resources: ResourcesDependency) -> FollowingBody:
    """Encode what changes in the table of the collection's SQL source within seconds.

    From now on: what changed before, a re-index brings. Its key is read from the query where that names a column.
    """
    for value in (body.table, body.key_column):
        if value is not None and not value.isprintable():
            raise InvalidOption(f"{value!r} is no name: it has characters that none has.")

    def follow(connection: Connection) -> object:
        return follow_table(connection, name, table=body.table, key_column=body.key_column)

    return _change(resources, name, follow)


@router.post("/v1/collections/{name}/source/unfollow")
def post_unfollow(name: CollectionName, resources: ResourcesDependency) -> FollowingBody:
    """Remove the triggers, and what waits of their changes. Rows of the collection stay."""
    return _change(resources, name, lambda connection: unfollow_table(connection, name))


def _change(resources: Resources, name: str, act: Callable[[Connection], object]) -> FollowingBody:
    act_in_short_locks(resources.engine, act, patience_seconds=PATIENCE_SECONDS)
    with resources.engine.connect() as connection:
        return FollowingBody.of(name, find_following(connection, name))
