"""Models and workers over HTTP: what can be asked for, and who would do it."""

from typing import Annotated

from fastapi import APIRouter, Path

from api.dependencies import ResourcesDependency
from api.schemas import ModelBody, ModelList, WorkerBody, WorkerList
from vectormill.domain.errors import ModelError
from vectormill.models.registry import Registry
from vectormill.workers.workers import count_workers, list_workers

router = APIRouter(tags=["models"])


@router.get("/v1/models")
def get_models(resources: ResourcesDependency) -> ModelList:
    """The registered models by name."""
    with resources.engine.connect() as connection:
        num_workers = count_workers(connection)
    registry = resources.registry
    return ModelList(
        data=[describe_model(registry, name, num_workers.get(name, 0)) for name in registry.names()]
    )


def describe_model(registry: Registry, name: str, num_workers: int) -> ModelBody:
    try:
        return ModelBody.from_card(registry.card(name), num_workers)
    except ModelError as error:
        return ModelBody(id=name, name=name, workers=num_workers, problem=str(error))


# A name may have slashes.
@router.get("/v1/models/{name:path}")
def get_model(
    resources: ResourcesDependency, name: Annotated[str, Path(description="The model's name.")]
) -> ModelBody:
    """One registered model."""
    resources.registry.entry(name)
    with resources.engine.connect() as connection:
        num_workers = count_workers(connection)
    return describe_model(resources.registry, name, num_workers.get(name, 0))


@router.get("/v1/workers")
def get_workers(resources: ResourcesDependency) -> WorkerList:
    """The workers that gave a sign of life lately, with their own report of device, backend and precision."""
    with resources.engine.connect() as connection:
        workers = list_workers(connection)
    return WorkerList(data=[WorkerBody.from_worker(worker) for worker in workers])
