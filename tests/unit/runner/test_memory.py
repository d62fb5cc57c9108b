"""The share of a GPU's memory that a model process reports, with torch's allocator and the driver simulated."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.detect import Memory
from worker.devices.device import CUDA, Device, Inventory, divide_gpus, parse_devices
from worker.placement.capacity import OVERHEAD_BYTES
from worker.plan import plan_machine
from worker.runner import memory
from worker.runner.memory import MemoryGauge, cap_allocator
from worker.settings import WorkerSettings

GIB = 1 << 30
CARD_BYTES = 96 * GIB
SEVEN_B = str(Path(__file__).parents[3] / "docs/plans/mistral-7b")
CONTEXT = OVERHEAD_BYTES[CUDA]  # of a process


@dataclass
class Card:
    """A GPU, and what each process on it has allocated and reserved; other programs hold `foreign` bytes."""

    foreign: int = 0
    reserved: list[int] = field(default_factory=list)

    @property
    def free_bytes(self) -> int:
        return CARD_BYTES - self.foreign - sum(reserved + CONTEXT for reserved in self.reserved)


class FakeCuda:
    """torch.cuda as the process with this number sees it."""

    def __init__(self, card: Card, number: int, allocated: int, free_bytes: int | None = None) -> None:
        self._card, self._number, self._allocated = card, number, allocated
        self._free_bytes = free_bytes
        self.fraction: float | None = None

    def max_memory_allocated(self) -> int:
        return self._allocated

    memory_allocated = max_memory_allocated

    def memory_reserved(self) -> int:
        return self._card.reserved[self._number]

    def mem_get_info(self) -> tuple[int, int]:
        return (self._card.free_bytes if self._free_bytes is None else self._free_bytes), CARD_BYTES

    def reset_peak_memory_stats(self) -> None:
        pass

    def memory_snapshot(self) -> list[dict[str, object]]:
        return []  # expandable segments: nothing is lost in holes

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fraction = fraction


def read_share(device: Device, cuda: FakeCuda) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        report = MemoryGauge(device).read()
    assert report is not None
    return report.used_share


def divide(count: int, free_bytes: int = CARD_BYTES) -> list[Device]:
    whole = Device("cuda:0", CUDA, 0, (), 8, CARD_BYTES, uuid="GPU-1", free_bytes=free_bytes)
    names, inventory = divide_gpus(f"cuda:0*{count}", Inventory((whole,), ((0,),), GIB, frozenset(), ""))
    return parse_devices(names, inventory)


def share_card(free_bytes: int) -> list[Device]:
    """Return the GPU as each of two models of unequal size has it."""
    whole = Device("cuda:0", CUDA, 0, (), 8, CARD_BYTES, uuid="GPU-1", free_bytes=free_bytes)
    cards = [Registry({}).outline(name) for name in (DEFAULT_MODEL, SEVEN_B)]
    plans = plan_machine(cards, Inventory((whole,), ((0,),), GIB, frozenset(), ""), WorkerSettings())
    return [device for planned in plans for device in planned.devices]


def cap_bytes(device: Device) -> int:
    cuda = FakeCuda(Card(), 0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        cap_allocator(device)
    assert cuda.fraction is not None
    return int(cuda.fraction * CARD_BYTES)


@given(st.integers(1, 8), st.integers(0, 40), st.data())
def test_what_neighbours_have_cached_takes_nothing_from_a_part_and_all_parts_fit_on_the_card(
    count: int, foreign_gib: int, data: st.DataObject
) -> None:
    """The neighbours' allocators fill their own bounds to the last byte, with tensors or with their cache.

    They are workers of one model, or if `count` is 1, two models that were planned together.
    """
    free_bytes = CARD_BYTES - foreign_gib * GIB
    devices = share_card(free_bytes) if count == 1 else divide(count, free_bytes)
    count = len(devices)
    bounds = [cap_bytes(device) for device in devices]
    assert sum(bounds) + count * CONTEXT + foreign_gib * GIB <= CARD_BYTES
    own_bound = bounds[0]
    reserved = data.draw(st.integers(0, own_bound), "reserved")
    allocated = data.draw(st.integers(0, reserved), "allocated")
    card = Card(foreign_gib * GIB, [reserved, *bounds[1:]])
    share = read_share(devices[0], FakeCuda(card, 0, allocated))
    used = foreign_gib * GIB * devices[0].memory_bytes / CARD_BYTES + CONTEXT + allocated
    assert share == pytest.approx(used / devices[0].memory_bytes, abs=1e-6)
    alone = replace(card, reserved=[reserved])
    assert share == pytest.approx(read_share(devices[0], FakeCuda(alone, 0, allocated)), abs=1e-6)


def test_a_program_that_takes_a_divided_card_later_is_noticed() -> None:
    part, *_ = divide(4)
    card = Card(80 * GIB, [4 * GIB])  # of 24 GiB, some 12 are left
    assert read_share(part, FakeCuda(card, 0, 2 * GIB)) > 0.4


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_of_a_whole_card_all_counts_but_the_own_cache(foreign: int, allocated: int, cached: int) -> None:
    whole = Device("cuda:0", CUDA, 0, (), 8, CARD_BYTES, uuid="GPU-1")
    card = Card(foreign * GIB // 2, [(allocated + cached) * GIB // 2])
    share = read_share(whole, FakeCuda(card, 0, allocated * GIB // 2))
    assert share == pytest.approx((card.foreign + CONTEXT + allocated * GIB // 2) / CARD_BYTES)


def test_of_memory_that_a_gpu_shares_with_the_host_as_much_is_free_as_the_host_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA itself counts what the kernel keeps of files as used."""
    monkeypatch.setattr(memory, "detect_memory", lambda: Memory(120 * GIB, 90 * GIB))
    gpu = Device("cuda:0", CUDA, 0, (), 8, 120 * GIB, uuid="GPU-1", shares_host_memory=True)
    cuda = FakeCuda(Card(0, [8 * GIB]), 0, 2 * GIB, free_bytes=5 * GIB)
    assert read_share(gpu, cuda) == pytest.approx(24 / 120)
