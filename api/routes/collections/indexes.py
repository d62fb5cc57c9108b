"""The indexes of a collection over HTTP: what there is and why, and what there shall be."""

from fastapi import APIRouter, Response

from api.bodies.indexes import IndexBody, IndexRequest
from api.bodies.sources.runs import RunBody
from api.dependencies import CollectionName, ResourcesDependency
from vectormill.collections.collection import HNSW, require_vectors
from vectormill.collections.collections import find_generation
from vectormill.collections.indexes.builds import find_progress
from vectormill.collections.indexes.index_plan import IndexWishes
from vectormill.collections.indexes.indexes import find_indexes, find_wishes, set_wishes
from vectormill.collections.indexes.plans import plan_for
from vectormill.runs.run import INDEX
from vectormill.runs.runs import create_run

router = APIRouter(tags=["indexes"])


@router.get("/v1/collections/{name}/index")
def get_index(resources: ResourcesDependency, name: CollectionName) -> IndexBody:
    """The indexes that there are, what would be built now and why, and how far a build is."""
    with resources.engine.begin() as connection:
        generation = find_generation(connection, name)
        outlook = plan_for(connection, generation, resources.settings, {})
        indexes = find_indexes(connection, generation.id)
        progress = find_progress(connection, generation.id)
    return IndexBody.of(generation, outlook, indexes, progress)


@router.put("/v1/collections/{name}/index", status_code=202)
def put_index(
    resources: ResourcesDependency, name: CollectionName, body: IndexRequest, response: Response
) -> RunBody:
    """Keep what is wanted, and start a run that builds what is missing and drops what is not wanted."""
    policy, fields = body.choose_policy(), body.fields()
    with resources.engine.begin() as connection:
        generation = find_generation(connection, name)
        if policy == HNSW or body.shape() or body.rebuild:
            require_vectors(name, generation.kind, "An HNSW index is of")
        kept = find_wishes(connection, generation.id)
        options = {**kept.options, **body.shape()}
        IndexWishes.from_options(policy or kept.policy, options)
        set_wishes(connection, name, policy=policy, options=options, filters=fields)
        run = create_run(connection, name, INDEX, options=body.run_options())
    assert run is not None, "only a due time of a schedule has a run already"
    response.headers["Location"] = f"/v1/runs/{run.id}"
    return RunBody.from_run(run)
