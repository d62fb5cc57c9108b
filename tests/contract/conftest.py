"""Models and conversions are written once a session: what is compared is vectors, not the writing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import worker.openvino.conversion
from tests.models import TinyModels


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, conversions: Path) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    (directory / "openvino").symlink_to(conversions)
    return directory


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that meet after every tiny product take longer than the products: a conversion 7 s of processor time with
    two, on cores that others use too, and 1.5 s with one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def converts_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own would import torch anew for each of some forty tiny models, 6 seconds each."""
    monkeypatch.setattr(
        worker.openvino.conversion, "convert_in_child", worker.openvino.conversion.convert_here
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))
