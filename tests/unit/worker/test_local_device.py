"""Which device a LocalEncoder takes, and what Ray and Spark have reserved for it."""

import pytest

from vectormill.domain.errors import ConfigurationError
from vectormill.integrations.ray import choose_share
from worker.devices.device import CUDA, Device, Inventory
from worker.local import choose_device, halve

GPUS = tuple(Device(f"cuda:{n}", CUDA, n, (), 1, 24 << 30, uuid=f"GPU-{n}") for n in range(2))
CORES = ((0, 4), (1, 5), (2, 6), (3, 7))


def make_inventory(*gpus: Device) -> Inventory:
    return Inventory(gpus, CORES, 64 << 30, frozenset(), "a processor", core_nodes=(0, 0, 1, 1))


@pytest.mark.parametrize(
    ("gpus", "name", "num_cores", "chosen", "num_threads", "cores"),
    [
        (GPUS, "auto", None, "cuda:0", 1, ()),
        (GPUS, "auto", 2, "cuda:0", 1, ()),  # cores are for a CPU
        (GPUS, "cuda:1", None, "cuda:1", 1, ()),
        (GPUS, "cuda", None, "cuda:0", 1, ()),
        (GPUS, "cpu", None, "cpu:0", 4, tuple(range(8))),
        ((), "auto", None, "cpu:0", 4, tuple(range(8))),  # not one NUMA node of two
        ((), "auto", 2, "cpu:0", 2, ()),  # pinned to none, since nobody says which are free
        ((), "cpu", 9, "cpu:0", 4, tuple(range(8))),
    ],
)
def test_one_device_is_chosen(
    gpus: tuple[Device, ...],
    name: str,
    num_cores: int | None,
    chosen: str,
    num_threads: int,
    cores: tuple[int, ...],
) -> None:
    device = choose_device(name, make_inventory(*gpus), num_cores)
    assert (device.name, device.num_threads, device.cores) == (chosen, num_threads, cores)


@pytest.mark.parametrize(
    ("name", "num_cores", "told"),
    [
        ("cuda:0,cuda:1", None, "uses one device"),
        ("cuda:7", None, "Unknown device 'cuda:7'"),
        ("cpu", 0, "num_cores must be at least 1"),
    ],
)
def test_what_is_no_single_device_is_refused(name: str, num_cores: int | None, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        choose_device(name, make_inventory(*GPUS), num_cores)


@pytest.mark.parametrize(
    ("reserved", "share"),
    [
        ({}, ("auto", None)),  # not in an actor
        ({"CPU": 1.0, "GPU": 1.0}, ("auto", None)),
        ({"CPU": 1.0, "GPU": 0.25}, ("auto", None)),
        ({"CPU": 8.0}, ("cpu", 8)),
        ({"CPU": 0.5}, ("cpu", 1)),
        ({"memory": 1e9}, ("cpu", None)),  # no cores were reserved: all of them
    ],
)
def test_an_actor_uses_what_ray_has_reserved_for_it(
    reserved: dict[str, float], share: tuple[str, int | None]
) -> None:
    assert choose_share(reserved) == share


def test_a_group_is_halved_and_a_single_text_stays_as_it_is() -> None:
    assert halve(range(3, 8)) == (range(3, 5), range(5, 8))
    assert halve(range(3, 5)) == (range(3, 4), range(4, 5))
    assert halve(range(3, 4)) == (range(3, 4),)
