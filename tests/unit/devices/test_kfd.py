"""AMD's GPUs from the files of a kernel, written here as it writes them: two processors, four GPUs."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from worker.devices import detect
from worker.devices.detect import detect_rocm_devices
from worker.devices.device import MEMORY, NVLINK, PCIE, SOCKETS, device_environment
from worker.devices.kfd import list_amd_gpus

GIB = 1 << 30


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
    assert "There are 4 AMD GPUs, and torch here is not built for ROCm" in caplog.text


def test_a_machine_without_amd_s_driver_has_none_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert detect_rocm_devices({}, 8, tmp_path / "nowhere")[0] == []
    assert not caplog.text
