"""What every test run says first: the processor that it ran on. Kernels and the precision follow from its features, so
that a failure on one kind of machine may not be seen on another."""

import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

from tests.completeness import Completeness
from worker.devices.detect import PROCESSOR_FEATURES, detect_inventory
from worker.devices.device import split_processor
from worker.encoder.choice import choose_precision
from worker.encoder.encoder import AUTO

# Whatever else is set for the machine: a deadline an example would be a timed test, which fails where others work.
settings.register_profile("untimed", parent=settings.default, deadline=None)
settings.load_profile("untimed")

# By which torch and oneDNN behave as on a lesser processor.
MASKS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")

# A module-level mark by which the whole file is of the tail, on one line or on several.
LEFT_OUT = re.compile(r"^pytestmark = (?:.*|\[\n(?: .*\n)*)pytest\.mark\.(?:tail|slow)\b", re.MULTILINE)
CORE = "not tail and not slow"


def pytest_configure(config: pytest.Config) -> None:
    is_controller = not hasattr(
        config, "workerinput"
    )  # which hands tests to other processes, or is the only one
    if is_controller and config.pluginmanager.has_plugin("cacheprovider"):
        config.pluginmanager.register(Completeness(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, before each process imports them, the files of which the core runs nothing."""
    if collection_path.suffix != ".py" or config.option.markexpr != CORE:
        return None
    return bool(LEFT_OUT.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_collection_finish() -> None:
    """What was collected is there to the end. Visited, it makes each full garbage collection take a second, and whoever
    allocates as much as a conversion of a model causes several."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the packaged model is kept as openvino reads it, for all processes of this run: it takes 6 s to convert.

    Whoever comes first makes it; of two that come at once one is used.
    """
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "openvino"
    directory.mkdir(exist_ok=True)
    return directory


def pytest_report_header() -> list[str]:
    inventory = detect_inventory()
    device = split_processor(inventory, 1)[0]
    there, lacking = sorted(inventory.features), sorted(PROCESSOR_FEATURES - inventory.features)
    precision = choose_precision(AUTO, device)
    gibibytes = inventory.memory_bytes / 2**30
    masked = "".join(f"; {name}={os.environ[name]}" for name in MASKS if name in os.environ)
    return [
        f"processor: {inventory.description}, {device.num_threads} cores, {gibibytes:.0f} GiB{masked}",
        f"  has {' '.join(there) or 'nothing of'}; lacks {' '.join(lacking) or 'nothing'}",
        f"  precision auto is {precision.value}: {precision.reason}",
        f"accelerators: {', '.join(each.name for each in inventory.accelerators) or 'none'}",
    ]
