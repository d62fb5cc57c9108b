"""Which cores a worker may use, and in what order they are shared out."""

import os
from pathlib import Path

import pytest

from worker.devices import detect
from worker.devices.device import CPU, Inventory, parse_devices, split_processor


def test_cores_of_one_processor_stay_together_where_numbers_go_to_and_fro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight logical processors, two of a core, and cores in turn on one of two sockets, as some servers number them."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
        (folder / "physical_package_id").write_text(f"{core % 2}\n")
    monkeypatch.setattr(detect, "CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(detect, "read_cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    groups = detect.detect_physical_cores()
    assert groups == ((0, 4), (2, 6), (1, 5), (3, 7))
    devices = split_processor(Inventory((), groups, 1 << 30, frozenset(), ""), 2)
    assert [device.cores for device in devices] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_the_numa_nodes_of_a_processor_are_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores on two sockets, and each socket with two nodes, whose cores are numbered in turn."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology" / "physical_package_id").write_text(f"{core % 2}\n")
        (folder / f"node{core % 4}").mkdir()
    monkeypatch.setattr(detect, "CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(detect, "read_cpu_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    devices = parse_devices(CPU, detect.detect_inventory({}))
    assert [device.cores for device in devices] == [(0, 4), (2, 6), (1, 5), (3, 7)]
    assert [device.name for device in devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def test_a_machine_that_tells_no_nodes_is_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "CPU_TOPOLOGY", tmp_path)
    assert len(parse_devices(CPU, detect.detect_inventory({}))) == 1
