"""The launcher chooses how many workers feed a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.described import describe_inventory
from worker.devices.device import Inventory
from worker.placement.tenants import Planned
from worker.plan import plan_machine
from worker.settings import WorkerSettings

SEVEN_B = str(Path(__file__).parents[3] / "docs/plans/mistral-7b")


def make_inventory(gpus: str, num_cores: int) -> Inventory:
    """Return described GPUs, each of which has so many cores of the host."""
    inventory = describe_inventory(gpus)
    devices = (replace(device, num_tokenizer_threads=num_cores) for device in inventory.accelerators)
    return replace(inventory, accelerators=tuple(devices))


def plan(inventory: Inventory, *models: str, **settings: str) -> tuple[Planned, ...]:
    cards = [Registry({}).outline(model) for model in models]
    return plan_machine(cards, inventory, WorkerSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "num_cores", "model", "count", "reason"),
    [
        ("1x80GiB@sm_90", 16, DEFAULT_MODEL, 8, "it has 16 cores of the host."),
        ("1x80GiB@sm_90", 200, DEFAULT_MODEL, 18, "it has 80 GiB of memory."),
        ("1x24GiB@sm_75", 16, DEFAULT_MODEL, 3, "it may compute some 1,408,876 tokens/s."),
        ("1x80GiB@sm_90", 3, DEFAULT_MODEL, 1, ""),
        ("1x80GiB@sm_90", 16, SEVEN_B, 1, ""),
    ],
)
def test_a_gpu_is_fed_by_as_many_workers_as_it_its_host_and_its_memory_allow(
    gpus: str, num_cores: int, model: str, count: int, reason: str
) -> None:
    (planned,) = plan(make_inventory(gpus, num_cores), model)
    assert len(planned.placement.replicas) == count
    said = [each for each in planned.placement.reasons if "workers feed" in each]
    assert [each.partition("and ")[2] for each in said] == ([reason] if reason else [])


@pytest.mark.parametrize("settings", [{"devices": "cuda"}, {"devices": "cuda:0"}, {"strategy": "pipeline"}])
def test_devices_and_strategies_that_are_named_are_taken_as_they_are(settings: dict[str, str]) -> None:
    (planned,) = plan(make_inventory("2x80GiB@sm_90", 16), DEFAULT_MODEL, **settings)
    assert not any("." in device.name for device in planned.devices)


def test_models_that_share_a_gpu_have_a_worker_each() -> None:
    plans = plan(make_inventory("1x80GiB@sm_90", 16), DEFAULT_MODEL, DEFAULT_MODEL)
    assert [len(planned.placement.replicas) for planned in plans] == [1, 1]
