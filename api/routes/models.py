"""Models and workers over HTTP: which models are registered, and which workers are alive."""

from typing import Annotated, Any, cast

from fastapi import APIRouter, Path
from sqlalchemy import Connection

from api.dependencies import ResourcesDependency
from api.serving import serve
from vectormill.domain.errors import ModelError
from vectormill.models import operations
from vectormill.models.model_card import ModelCard
from vectormill.models.operations import ModelBody, ModelList
from vectormill.models.specs import find_own_task
from vectormill.operation import describe
from vectormill.workers import operations as worker_operations
from vectormill.workers.operations import WorkerBody, WorkerList
from vectormill.workers.workers import count_workers, list_workers

router = APIRouter(tags=["models"])


@serve(router, operations.LIST)
def get_models(resources: ResourcesDependency) -> ModelList:
    """List the registered models by name."""
    with resources.engine.connect() as connection:
        num_workers = count_workers(connection)
    cards = resources.registry.cards(resources.registry.names())
    return ModelList(
        object="list",
        data=[describe_model(name, card, num_workers.get(name, 0)) for name, card in cards.items()],
    )


@serve(router, operations.SHOW)
def get_model(
    resources: ResourcesDependency, name: Annotated[str, Path(description="The model's name.")]
) -> ModelBody:
    """Return one registered model."""
    resources.registry.entry(name)
    with resources.engine.connect() as connection:
        num_workers = count_workers(connection)
    return describe_model(name, resources.registry.cards([name])[name], num_workers.get(name, 0))


def describe_model(name: str, card: ModelCard | ModelError, num_workers: int) -> ModelBody:
    """Return the JSON body that describes the model; if its files cannot be read, `problem` says why."""
    known: dict[str, Any] = {
        "id": name, "object": "model", "owned_by": "vectormill", "name": name, "workers": num_workers,
    }  # fmt: skip
    if isinstance(card, ModelError):
        unread = dict.fromkeys(ModelBody.__annotations__) | {
            "created": 0,
            "prompts": {},
            "notes": [],
            "settings": [],
        }
        return cast(ModelBody, unread | known | {"problem": str(card)})
    return describe(
        ModelBody,
        card,
        **known,
        created=find_moment(card),
        task=find_own_task(card),
        pooling="+".join(card.pooling),
        problem=" ".join(card.flaws) or None,
        notes=list(card.notes),
        settings=list(card.settings),
        unprompted=card.unprompted or None,
    )


def find_moment(card: ModelCard) -> int:
    """Return the time of the model's files, in seconds since 1970; 0 if they have been removed since."""
    try:
        return int((card.path / "config.json").stat().st_mtime)
    except OSError:
        return 0


@serve(router, worker_operations.LIST)
def get_workers(connection: Connection) -> WorkerList:
    """List the live workers, with the device, backend and precision that each reports."""
    return WorkerList(data=[describe(WorkerBody, worker) for worker in list_workers(connection)])
