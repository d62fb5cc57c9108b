"""Plans the placement of a model as a worker with these settings would run it. Starts nothing; asks no hardware."""

from vectormill.model_card import ModelCard
from worker.devices.device import Inventory, parse_devices
from worker.model.choice import choose_precision
from worker.parallel.layouts import LAYOUTS
from worker.placement.model_shape import ModelShape, has_weights, read_model_shape
from worker.placement.placement import Placement
from worker.placement.planner import PlanSettings, plan_placement
from worker.settings import WorkerSettings


def plan_worker(card: ModelCard, inventory: Inventory, settings: WorkerSettings) -> Placement:
    """The same for everyone who asks on one machine. Raises ModelError, ModelDoesNotFit and ConfigurationError."""
    shape = find_shape(card)
    precision = choose_precision(settings.precision, parse_devices(settings.devices, inventory)[0]).value
    obstacle = (
        ""
        if shape.model_type in LAYOUTS
        else f"models of the architecture {shape.model_type!r} cannot be shared between devices"
    )
    layout = LAYOUTS.get(shape.model_type)
    return plan_placement(
        inventory,
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
