"""The indexes of a collection over HTTP: what there is and why, and what there shall be."""

from fastapi import APIRouter

from api.dependencies import CollectionName, ResourcesDependency
from api.serving import serve
from vectormill.collections.collection import HNSW, require_vectors
from vectormill.collections.collections import find_generation
from vectormill.collections.indexes import operations
from vectormill.collections.indexes.bodies import BuildProgressBody, IndexBody, IndexRequest, OneIndexBody
from vectormill.collections.indexes.builds import find_progress
from vectormill.collections.indexes.index_plan import IndexWishes
from vectormill.collections.indexes.indexes import find_indexes, find_wishes, set_wishes
from vectormill.collections.indexes.plans import plan_for
from vectormill.operation import describe
from vectormill.runs.bodies import RunBody, describe_run
from vectormill.runs.run import INDEX
from vectormill.runs.runs import create_run

router = APIRouter(tags=["indexes"])


@serve(router, operations.SHOW)
def get_index(resources: ResourcesDependency, name: CollectionName) -> IndexBody:
    """The indexes that there are, what would be built now and why, and how far a build is."""
    with resources.engine.begin() as connection:
        generation = find_generation(connection, name)
        outlook = plan_for(connection, generation, resources.settings, {})
        indexes = find_indexes(connection, generation.id)
        progress = find_progress(connection, generation.id)
    return describe(
        IndexBody,
        outlook,
        collection=name,
        generation=generation.id,
        policy=outlook.kept.policy,
        options=outlook.kept.options,
        filters=outlook.kept.filters,
        changed_share=outlook.worn,
        indexes=[describe(OneIndexBody, index) for index in indexes],
        plan=outlook.plan.to_json(),
        built=outlook.record,
        progress=None if progress is None else describe(BuildProgressBody, progress),
    )


@serve(router, operations.CHANGE)
def put_index(resources: ResourcesDependency, name: CollectionName, body: IndexRequest) -> RunBody:
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
        run = create_run(connection, name, INDEX, options={"rebuild": True} if body.rebuild else {})
    assert run is not None, "only a due time of a schedule has a run already"
    return describe_run(run)
