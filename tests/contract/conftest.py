"""Models and conversions are written once a session: what is compared is vectors, not the writing."""

from pathlib import Path

import pytest

import worker.model.conversion
from tests.models import TinyModels


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("conversions")


@pytest.fixture(autouse=True)
def converts_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own would import torch anew for each of some forty tiny models, 6 seconds each."""
    monkeypatch.setattr(worker.model.conversion, "convert_in_child", worker.model.conversion.convert_network)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))
