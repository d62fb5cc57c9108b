"""Load a model once as the workers of this machine would, which shows that they can, and converts it for them."""

import sys
from typing import Any

from rich.console import Console

from vectormill.models.model_card import ModelCard
from vectormill.settings import Settings
from worker.devices.detect import detect_inventory
from worker.engine.engine import Engine
from worker.launcher import assign_replicas
from worker.loading import LoadingDisplay
from worker.plan import plan_machine
from worker.settings import find_cache_dir, load_worker_settings


def prepare(card: ModelCard, settings: Settings) -> dict[str, Any] | None:
    """Load the model on the first of the planned devices, and return the report of the engine, as of a worker.

    Return None without loading it if several devices share it; such a model needs no conversion. A conversion for
    openvino stays in the cache directory. Raise ModelDoesNotFit and ModelError.
    """
    worker_settings = load_worker_settings()
    (planned,) = plan_machine([card], detect_inventory(), worker_settings)
    devices = assign_replicas(planned)[0].devices
    if len(devices) > 1:
        return None
    display = LoadingDisplay(card.name, Console(stderr=True) if sys.stderr.isatty() else None)
    engine = Engine(card, devices[0], worker_settings, find_cache_dir(settings), display=display)
    try:
        engine.start()
        return engine.report()
    finally:
        engine.stop()
