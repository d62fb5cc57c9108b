"""What a model process is told by its environment."""

from pathlib import Path

import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.device import CPU, CUDA, Device
from worker.encoder.encoder import EncoderOrder
from worker.runner import starter
from worker.runner.starter import RunnerStarter

EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("kind", "environment", "expected"),
    [
        (CUDA, {}, EXPANDABLE),
        (CUDA, {"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        (CUDA, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),  # torch's older name for it
        (CPU, {}, None),
    ],
)
def test_the_allocator_of_a_gpu_expands_its_segments_unless_a_user_has_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, kind: str, environment: dict[str, str], expected: str | None
) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(starter, "Runner", lambda load, environment: told.append(environment))
    device = Device(f"{kind}:0", kind, 0, (), 1, 1 << 30, uuid="GPU-1")
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, Path())
    RunnerStarter("module:function", order, environment, collective_timeout_seconds=1).start()
    assert told[0].get("PYTORCH_ALLOC_CONF") == expected
    assert told[0]["HF_HUB_DISABLE_PROGRESS_BARS"] == "1", "the only bar is ours"
    assert told[0]["CUDA_VISIBLE_DEVICES"] == ("GPU-1" if kind == CUDA else "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "/cache/compiled"), ({"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}, "/elsewhere")],
)
def test_what_is_compiled_lies_in_the_workers_cache_unless_a_user_has_said_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(starter, "Runner", lambda load, environment: told.append(environment))
    device = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
    order = EncoderOrder(Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, Path("/cache"))
    RunnerStarter("module:function", order, environment, collective_timeout_seconds=1).start()
    assert told[0]["TORCHINDUCTOR_CACHE_DIR"] == expected
