"""The process that reads foreign models knows no password: what it loads could otherwise reach every job."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_engine import CARD
from vectormill.settings import SECRET_VARIABLES
from worker.devices.device import CPU, Device
from worker.encoder.encoder import EncoderOrder
from worker.runner import starter
from worker.runner.starter import RunnerStarter

DEVICE = Device("cpu:0", CPU, 0, (), 1, 1 << 30)


def test_the_model_process_gets_neither_the_database_nor_redis_nor_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(starter, "Runner", lambda load, environment: seen.append(environment))
    order: Any = EncoderOrder(CARD, replace(DEVICE), "auto", "auto", 1, tmp_path)
    environment = dict.fromkeys(SECRET_VARIABLES, "moonshine") | {"PATH": "/bin", "HF_HOME": "/hub"}
    RunnerStarter("module:function", order, environment, collective_timeout_seconds=1).start()
    assert "VECTORMILL_DATABASE_URL" in environment
    assert "VECTORMILL_REDIS_URL" in environment
    assert "moonshine" not in seen[0].values()
    assert (seen[0]["PATH"], seen[0]["HF_HOME"]) == ("/bin", "/hub")
