"""A replica that two devices share, as tests plan it, and engines that are stopped at the end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.faulty_engine import runner_pids
from vectormill.models.model_card import ModelCard
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, CUDA, Device, Inventory, parse_devices
from worker.engine.engine import Engine
from worker.placement.placement import PlanSettings
from worker.placement.planner import plan_placement
from worker.runner.starter import Sharing

TWO_DEVICES = "cpu:0,cpu:1"


def find_two(kind: str = CPU) -> tuple[Inventory, tuple[Device, ...]]:
    """Return two GPUs, or two shares of the cores; a machine with one core uses it for both."""
    inventory = detect_inventory()
    if kind == CUDA:
        return inventory, inventory.accelerators[:2]
    cores = inventory.physical_cores if len(inventory.physical_cores) > 1 else inventory.physical_cores * 2
    inventory = Inventory((), cores, inventory.memory_bytes, inventory.features, inventory.description)
    return inventory, tuple(parse_devices(TWO_DEVICES, inventory))


def share_between_two(card: ModelCard, strategy: str, kind: str = CPU) -> Sharing:
    """Plan a replica in fp32 over two devices."""
    inventory, devices = find_two(kind)
    names = ",".join(device.name for device in devices)
    asked = PlanSettings("fp32", min(card.max_tokens, 512), names, strategy)
    return Sharing(plan_placement(inventory, card.find_shape(), asked).replicas[0], devices)


@contextmanager
def starting_engines() -> Iterator[Callable[[Engine], Engine]]:
    """Yield a function that starts an engine; at the end all are stopped, and no process of theirs may be left."""
    engines: list[Engine] = []

    def start(engine: Engine) -> Engine:
        engines.append(engine)
        engine.start()
        return engine

    try:
        yield start
    finally:
        for engine in engines:
            engine.stop()
    assert runner_pids() == []
