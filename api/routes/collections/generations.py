"""Generations over HTTP: go back to the one that was live before, or give one up."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from api.bodies.generations import RollbackAnswer
from api.dependencies import CollectionName, ResourcesDependency
from vectormill.collections.building import discard_generation
from vectormill.collections.generations import find_generation_by_id
from vectormill.collections.swaps import count_newer_rows, roll_back
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.errors import GenerationNotFound

router = APIRouter(tags=["collections"])

# A client waits, and may ask again.
PATIENCE_SECONDS: Final = 10.0

GenerationId = Annotated[int, Path(ge=1, le=2**63 - 1, description="The generation's number.")]


class RollbackWish(BaseModel):
    """The optional body of a rollback request."""

    allow_missing: bool = Field(
        default=False, description="Roll back although rows put since have no kept text, and may be missing."
    )


@router.post("/v1/collections/{name}/rollback")
def post_rollback(
    resources: ResourcesDependency, name: CollectionName, wanted: Annotated[RollbackWish, Query()]
) -> RollbackAnswer:
    """Makes the generation live that was live before the last swap or rollback; a run carries what was put since.

    409 when there is none, when a run is at work on the collection, when other objects depend on a view that would
    have to be made anew, or when texts that were put since are not kept and `allow_missing` is not said.
    """
    engine = resources.engine
    timeout_seconds = resources.settings.search_timeout_seconds
    with engine.connect() as connection:
        newer = count_newer_rows(connection, name, timeout_seconds=timeout_seconds)
    swap = act_in_short_locks(
        engine,
        lambda connection: roll_back(connection, name, newer=newer, allow_missing=wanted.allow_missing),
        patience_seconds=PATIENCE_SECONDS,
    )
    return RollbackAnswer.from_rollback(swap, newer)


@router.delete("/v1/collections/{name}/generations/{generation_id}", status_code=204)
def delete_generation(
    resources: ResourcesDependency, name: CollectionName, generation_id: GenerationId
) -> None:
    """Gives up a generation that is being built, or is retired: nobody goes back to it. Its disk space is free soon.

    The live one is refused with 409.
    """

    engine = resources.engine
    with engine.connect() as connection:
        generation = find_generation_by_id(connection, generation_id)
    if generation is None or generation.collection != name:
        raise GenerationNotFound(f"Collection {name!r} has no generation {generation_id}.")
    act_in_short_locks(
        engine,
        lambda connection: discard_generation(connection, generation_id),
        patience_seconds=PATIENCE_SECONDS,
    )
