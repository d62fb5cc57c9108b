"""GPUs as NVIDIA's driver, a fake one, and AMD's files describe them: which are ours, and how they are linked."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from worker.devices import detect
from worker.devices.detect import (
    DeviceSampler,
    DeviceUse,
    Memory,
    detect_cuda_devices,
    detect_inventory,
    detect_links,
    detect_rocm_devices,
)
from worker.devices.device import MEMORY, NVLINK, PCIE, SOCKETS, Device, device_environment, split_processor
from worker.devices.kfd import list_amd_gpus
from worker.devices.nvml import list_gpus, open_nvml, select_visible

GIB = 1 << 30


class FakeError(Exception):
    """What every function raises for what is not there."""


class NotSupported(FakeError):
    """The error that a driver raises if it does not answer a question."""


class FakeNvml:
    """Handles are UUIDs. GPU 1 is cut into two parts, whose places are 0 and 2; GPU 3 has fallen off the bus."""

    NVMLError: type[Exception] = FakeError
    NVMLError_NotSupported: type[Exception] = NotSupported

    def __init__(self) -> None:
        self.gpus = ["GPU-aa01", "GPU-bb02", "GPU-cc03", "GPU-lost"]
        self.parts = {"GPU-bb02": {0: "MIG-b0", 2: "MIG-b2"}}
        self.used = 30 * GIB
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        assert self.is_open
        return "580.95"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid in self.gpus or uuid.startswith("MIG-b"):
            return uuid
        raise FakeError("Not Found")

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200 MIG 1g.18gb" if handle.startswith("MIG") else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        total = 18 * GIB if handle.startswith("MIG") else 141 * GIB
        return SimpleNamespace(total=total, used=self.used, free=total - self.used)

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        if handle == "GPU-lost":
            raise FakeError("GPU is lost")
        return 9, 0

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle.startswith("MIG"):
            raise FakeError("Not Supported")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "GPU-aa01":
            raise FakeError("Not Supported")
        return [int(handle in self.parts), 0]

    def nvmlDeviceGetP2PStatus(self, one: str, other: str, what: int) -> int:
        if what != 2 or "MIG" in one + other:
            raise FakeError("Not Supported")
        return 0 if {one, other} == {"GPU-aa01", "GPU-cc03"} else 4

    def nvmlDeviceGetTopologyCommonAncestor(self, one: str, other: str) -> int:
        if {one, other} == {"MIG-b0", "MIG-b2"}:
            raise FakeError("Not Supported")
        return 50 if "MIG-b2" in (one, other) else 30

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index not in self.parts[handle]:
            raise FakeError("Not Found")
        return self.parts[handle][index]


def test_gpus_are_listed_in_the_order_of_the_bus_with_the_parts_of_one_that_is_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus = list_gpus(FakeNvml())
    assert [(gpu.index, gpu.uuid) for gpu in gpus] == [
        (0, "GPU-aa01"),
        (1, "MIG-b0"),
        (1, "MIG-b2"),
        (2, "GPU-cc03"),
    ]
    assert (gpus[0].memory_bytes, gpus[0].free_bytes, gpus[0].capability) == (141 * GIB, 111 * GIB, (9, 0))
    assert gpus[1].memory_bytes == 18 * GIB
    assert [gpu.card for gpu in gpus] == ["", "GPU-bb02", "GPU-bb02", ""]
    assert "Ignoring GPU 3" in caplog.text


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aa01", "MIG-b0", "MIG-b2", "GPU-cc03"]),  # unset: all
        ("", []),  # set to nothing: none, as device_environment sets it for a CPU
        ("-1", []),
        ("NoDevFiles", []),  # what Slurm writes for a job without a GPU
        ("2,0", ["GPU-cc03", "GPU-aa01"]),  # the order is the user's
        (" 0 , 2 ", ["GPU-aa01", "GPU-cc03"]),
        ("1", ["MIG-b0"]),  # CUDA shows the first part only
        ("GPU-cc", ["GPU-cc03"]),  # the beginning is enough
        ("MIG-b2,GPU-aa01", ["MIG-b2", "GPU-aa01"]),
        ("0,9,2", ["GPU-aa01", "GPU-cc03"]),  # CUDA would stop at the first that is not there
        ("0,-1,2", ["GPU-aa01"]),
        ("MIG-GPU-bb02/1/0", []),  # the form of old drivers is not understood, and is no crash
        ("0,0", ["GPU-aa01"]),
        ("G", []),  # no beginning of a UUID
    ],
)  # fmt: skip
def test_only_the_gpus_that_the_batch_system_gave_are_used(visible: str | None, expected: list[str]) -> None:
    assert [gpu.uuid for gpu in select_visible(visible, list_gpus(FakeNvml()))[0]] == expected


def test_a_gpu_that_is_named_and_not_there_is_said_and_none_is_not(caplog: pytest.LogCaptureFixture) -> None:
    gpus = list_gpus(FakeNvml())
    caplog.clear()
    select_visible("", gpus)
    assert not caplog.text
    select_visible("7", gpus)
    assert "names '7', which is not a GPU of this machine" in caplog.text


@pytest.mark.parametrize(
    ("visible", "there", "later", "ours"),
    [
        ("0,1", "a", "abc", "ab"),  # missing at the start
        ("GPU-b,GPU-a", "a", "abc", "ab"),
        ("1,3", "abcd", "bcd", "bd"),  # the driver numbers anew what is left
        ("1,3", "abcd", "acd", "d"),
        ("1", "abc", "", ""),
        (None, "a", "ab", "ab"),
        ("", "a", "ab", ""),
    ],
)
def test_the_gpus_that_are_named_are_ours_whenever_they_come_and_no_others(
    visible: str | None, there: str, later: str, ours: str
) -> None:
    nvml = FakeNvml()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    nvml.gpus = [f"GPU-{letter}" for letter in there]
    detect_cuda_devices(environment, 16, nvml)
    nvml.gpus = [f"GPU-{letter}" for letter in later]
    found = detect_cuda_devices(environment, 16, nvml)
    assert {gpu.uuid for gpu in found} == {f"GPU-{letter}" for letter in ours}


def test_devices_are_numbered_as_cuda_numbers_them_and_pinned_by_their_own_name() -> None:
    first, second = detect_cuda_devices({"CUDA_VISIBLE_DEVICES": "2,GPU-aa01"}, 16, FakeNvml())
    assert (first.name, first.uuid, second.name, second.uuid) == ("cuda:0", "GPU-cc03", "cuda:1", "GPU-aa01")
    assert (first.features, first.memory_bytes, first.num_threads) == (frozenset({"sm_90"}), 141 * GIB, 4)
    assert (first.num_tokenizer_threads, second.num_tokenizer_threads) == (8, 8)  # 16 cores for two GPUs
    assert device_environment(first)["CUDA_VISIBLE_DEVICES"] == "GPU-cc03"


def test_a_driver_that_cannot_count_its_gpus_leaves_none_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()

    def fail() -> int:
        raise FakeError("Driver/library version mismatch")

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", fail)
    assert detect_cuda_devices({}, 4, nvml) == []
    assert "Driver/library version mismatch" in caplog.text


@pytest.mark.parametrize(
    ("code", "is_said"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False),  # no driver: normal
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, False),  # the driver's library in an image, run without a GPU
        # A driver that was updated and waits for a restart.
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, True),
    ],
)
def test_a_machine_without_the_driver_has_no_gpu_and_only_a_broken_driver_is_said(
    code: int, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert open_nvml() is None
    assert not any(device.kind == "cuda" for device in detect_inventory({}).accelerators)
    assert bool(caplog.text) == is_said


class UnifiedNvml(FakeNvml):
    """A GB10 or a Jetson: the first GPU shares the host's memory, of which NVML says nothing."""

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle == "GPU-aa01":
            raise NotSupported("Not Supported")
        return super().nvmlDeviceGetMemoryInfo(handle)


def test_a_gpu_with_the_memory_of_the_host_is_listed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect_memory", lambda: Memory(120 * GIB, 100 * GIB))
    shared, *others = detect_cuda_devices({}, 8, UnifiedNvml())
    assert (shared.uuid, shared.memory_bytes, shared.free_bytes) == ("GPU-aa01", 120 * GIB, 100 * GIB)
    assert [device.shares_host_memory for device in (shared, *others)] == [True, False, False, False]
    use = DeviceSampler(shared, lambda: None, UnifiedNvml()).sample()
    assert use == DeviceUse(20 * GIB, 120 * GIB, 0.87)


def test_the_driver_has_a_version_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(detect, "open_nvml", lambda: nvml)
    assert detect.detect_driver() == "580.95"
    assert not nvml.is_open
    monkeypatch.setattr(detect, "open_nvml", lambda: None)
    assert detect.detect_driver() == ""


def test_a_detection_looks_anew_and_keeps_no_gpu_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that a process holds open cannot be reset."""
    nvml = FakeNvml()
    monkeypatch.setattr(detect, "open_nvml", lambda: nvml)
    assert len(detect_inventory({}).accelerators) == 4
    assert not nvml.is_open


def make_gpu(uuid: str) -> Device:
    return Device("cuda:0", "cuda", 0, (), 4, 141 * GIB, uuid=uuid)


@pytest.mark.parametrize(
    ("uuid", "expected"),
    [
        ("GPU-aa01", DeviceUse(30 * GIB, 141 * GIB, 0.87)),
        ("MIG-b0", DeviceUse(30 * GIB, 18 * GIB, None)),  # the driver tells no utilisation of a part
        ("GPU-gone", DeviceUse(None, 141 * GIB, None)),
    ],
)
def test_the_use_of_a_gpu_is_what_the_driver_says(uuid: str, expected: DeviceUse) -> None:
    assert DeviceSampler(make_gpu(uuid), lambda: None, FakeNvml()).sample() == expected


def test_the_use_of_a_cpu_is_that_of_the_process_that_encodes() -> None:
    device = split_processor(detect_inventory({}), 1)[0]
    pids: list[int | None] = [os.getpid(), os.getpid(), None, 2**22 + 1]
    sampler = DeviceSampler(device, lambda: pids.pop(0))
    first, second, without, gone = [sampler.sample() for _ in range(4)]
    assert first.memory_used_bytes is not None
    assert first.memory_used_bytes > 10 << 20
    assert first.utilisation is None  # nothing to compare with yet
    assert second.utilisation is not None
    assert 0 <= second.utilisation <= 1
    nobody = DeviceUse(None, device.memory_bytes, None)
    assert (without, gone) == (nobody, nobody)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("cuda:0", "cuda:3", "nvlink"),
        ("cuda:0", "cuda:1", "pcie"),  # below one host bridge
        ("cuda:0", "cuda:2", "sockets"),  # another processor lies between
        ("cuda:1", "cuda:2", "pcie"),  # the driver does not say
    ],
)
def test_the_links_between_gpus_are_those_that_the_driver_names(one: str, other: str, expected: str) -> None:
    nvml = FakeNvml()
    assert detect_links(detect_cuda_devices({}, 8, nvml), nvml).between(one, other) == expected


def write(path: Path, properties: Mapping[str, object]) -> None:
    path.mkdir(parents=True)
    (path / "properties").write_text("".join(f"{name} {value}\n" for name, value in properties.items()))


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    """Nodes 0 and 1 are processors, 2 to 5 are GPUs: two on each, and those of one processor joined by a bridge."""
    for node in (0, 1):
        write(tmp_path / str(node), {"cpu_cores_count": 32, "simd_count": 0, "gfx_target_version": 0})
    for node in (2, 3, 4, 5):
        path = tmp_path / str(node)
        gpu = {"cpu_cores_count": 0, "simd_count": 440, "gfx_target_version": 90010, "unique_id": 0xA0 + node}
        write(path, gpu)
        write(path / "mem_banks" / "0", {"heap_type": 1, "size_in_bytes": 64 * GIB})
        write(path / "mem_banks" / "1", {"heap_type": 4, "size_in_bytes": 65536})  # local data share
        write(path / "io_links" / "0", {"type": 2, "node_from": node, "node_to": node // 4})
        write(path / "io_links" / "1", {"type": 11, "node_from": node, "node_to": node ^ 1})
    return tmp_path


@pytest.fixture(autouse=True)
def _built_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "is_built_for_rocm", lambda: True)


def test_gpus_are_read_with_their_memory_architecture_and_links(topology: Path) -> None:
    devices, links = detect_rocm_devices({}, 64, topology)
    assert [device.name for device in devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert {device.memory_bytes for device in devices} == {64 * GIB}
    assert {device.description for device in devices} == {"AMD gfx90a"}
    assert all(device.has_bf16 for device in devices)
    assert links.between("cuda:0", "cuda:1") == NVLINK
    assert links.between("cuda:1", "cuda:2") == SOCKETS
    assert links.default == PCIE


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90006, "gfx906"),
        (110000, "gfx1100"),
        (100300, "gfx1030"),
    ],
)
def test_the_version_of_an_architecture_is_its_name(tmp_path: Path, version: int, name: str) -> None:
    write(tmp_path / "1", {"simd_count": 8, "gfx_target_version": version})
    assert [gpu.architecture for gpu in list_amd_gpus(tmp_path)] == [name]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),  # what batch systems set for either maker
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0"}, ["2"]),  # HIP's own wins
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),  # and numbers anew
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a4"}, ["0"]),
        ({"HIP_VISIBLE_DEVICES": "1,9,2"}, ["1"]),  # ends at the first that is not there
    ],
)
def test_only_visible_gpus_are_taken_and_each_process_is_pinned_to_its_own(
    topology: Path, environment: dict[str, str], expected: list[str]
) -> None:
    devices, _ = detect_rocm_devices(environment, 8, topology)
    pinned = [device_environment(device) for device in devices]
    assert [each["HIP_VISIBLE_DEVICES"] for each in pinned] == expected
    assert [each["CUDA_VISIBLE_DEVICES"] for each in pinned] == expected


def test_links_are_those_of_the_gpus_that_are_left(topology: Path) -> None:
    _, links = detect_rocm_devices({"ROCR_VISIBLE_DEVICES": "1,0"}, 8, topology)
    assert links.between("cuda:0", "cuda:1") == NVLINK
    _, links = detect_rocm_devices({"ROCR_VISIBLE_DEVICES": "0,2"}, 8, topology)
    assert links.between("cuda:0", "cuda:1") == SOCKETS


def test_gpus_that_torch_cannot_use_are_left_with_a_word(
    topology: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(detect, "is_built_for_rocm", lambda: False)
    devices, links = detect_rocm_devices({}, 8, topology)
    assert (devices, links.default) == ([], MEMORY)
    assert "Found 4 AMD GPUs, but torch is not built for ROCm" in caplog.text
