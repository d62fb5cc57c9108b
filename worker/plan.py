"""Plans the placement of models as a worker with these settings would run them. Starts nothing; asks no hardware."""

from collections.abc import Sequence

from vectormill.models.model_card import ModelCard
from worker.devices.device import Inventory, parse_devices
from worker.encoder.choice import choose_precision
from worker.parallel.layouts import LAYOUTS
from worker.placement.placement import Placement
from worker.placement.planner import PlanSettings
from worker.placement.sizes.model_shape import ModelShape, has_weights, read_model_shape
from worker.placement.together import Planned, Tenant, plan_together
from worker.settings import WorkerSettings


def plan_worker(card: ModelCard, inventory: Inventory, settings: WorkerSettings) -> Placement:
    """Of one model that has the machine to itself. Raises ModelError, ModelDoesNotFit and ConfigurationError."""
    return plan_machine([card], inventory, settings)[0].placement


def plan_machine(
    cards: Sequence[ModelCard], inventory: Inventory, settings: WorkerSettings
) -> tuple[Planned, ...]:
    """Of all models that the machine serves, in their order. Raises as `plan_worker` does."""
    return plan_together(inventory, [_make_tenant(card, inventory, settings) for card in cards])


def _make_tenant(card: ModelCard, inventory: Inventory, settings: WorkerSettings) -> Tenant:
    shape = find_shape(card)
    precision = choose_precision(settings.precision, parse_devices(settings.devices, inventory)[0]).value
    obstacle = (
        ""
        if shape.model_type in LAYOUTS
        else f"models of the architecture {shape.model_type!r} cannot be shared between devices"
    )
    layout = LAYOUTS.get(shape.model_type)
    return Tenant(
        card.name,
        shape,
        PlanSettings(
            precision=precision,
            max_tokens=card.max_tokens,
            devices=settings.devices,
            strategy=settings.strategy,
            memory_share=settings.memory_high_watermark,
            sharing_obstacle=obstacle,
            tensor_obstacle=layout.tensor_obstacle if layout is not None else "",
        ),
    )


def find_shape(card: ModelCard) -> ModelShape:
    """The model's shape from the headers of its weights, or, where there are none yet, from its configuration alone."""
    if has_weights(card):
        return read_model_shape(card)
    from worker.parallel.skeleton import list_shapes  # torch, which takes seconds to import

    return read_model_shape(card, list_shapes(card))
