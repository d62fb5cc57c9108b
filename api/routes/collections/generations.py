"""Generations over HTTP: go back to the one that was live before, or give one up."""

from typing import Annotated, Final

from fastapi import APIRouter, Path

from api.bodies.generations import RollbackAnswer
from api.dependencies import CollectionName, ResourcesDependency
from vectormill.db.collections.building import discard_generation
from vectormill.db.collections.generations import find_generation_by_id
from vectormill.db.collections.swaps import count_newer_rows, roll_back
from vectormill.db.short_locks import act_in_short_locks
from vectormill.domain.errors import GenerationNotFound

router = APIRouter(tags=["collections"])

# A client waits, and may ask again.
PATIENCE_SECONDS: Final = 10.0

GenerationId = Annotated[int, Path(ge=1, le=2**63 - 1, description="The generation's number.")]


@router.post("/v1/collections/{name}/rollback")
def post_rollback(resources: ResourcesDependency, name: CollectionName) -> RollbackAnswer:
    """Makes the generation live that was live before the last swap or rollback; twice, and all is as it was.

    409 when there is none, when a run is at work on the collection, or when other objects depend on a view that would
    have to be made anew.
    """
    engine = resources.engine
    timeout_seconds = resources.settings.search_timeout_seconds
    with engine.connect() as connection:
        num_newer_rows = count_newer_rows(connection, name, timeout_seconds=timeout_seconds)
    swap = act_in_short_locks(
        engine, lambda connection: roll_back(connection, name), patience_seconds=PATIENCE_SECONDS
    )
    return RollbackAnswer.from_swap(swap, num_newer_rows)


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
