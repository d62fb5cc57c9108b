"""Settings of all tests, and a report header that names the processor.

Kernels and precision depend on its features, so a failure on one kind of machine may not appear on another.
"""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.completeness import Completeness
from tests.core.table import count_by_file, read_table
from worker.devices.detect import PROCESSOR_FEATURES, detect_inventory
from worker.devices.device import split_processor
from worker.encoder.choice import choose_precision
from worker.encoder.encoder import AUTO

# No deadline per example, whatever is set on the machine: it would make a timed test, which fails on a busy
# machine.
settings.register_profile("untimed", parent=settings.default, deadline=None)
settings.load_profile("untimed")

# These variables make torch and oneDNN behave as on a lesser processor.
MASKS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")

CORE = read_table()
CORE_FILES = count_by_file(CORE.values())


def pytest_configure(config: pytest.Config) -> None:
    is_controller = not hasattr(
        config, "workerinput"
    )  # the controller hands tests to other processes, or is the only process
    if is_controller and config.pluginmanager.has_plugin("cacheprovider"):
        config.pluginmanager.register(Completeness(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, before any process imports them, files of which the core runs no test."""
    if collection_path.suffix != ".py" or config.option.markexpr != "core":
        return None
    return collection_path.relative_to(config.rootpath).as_posix() not in CORE_FILES or None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the core, and if only they are run, put the dearest files first.

    So no process is still busy with a long file when the others have finished.
    """
    for item in items:
        if item.nodeid in CORE and item.get_closest_marker("slow") is None:
            item.add_marker("core")
    if config.option.markexpr == "core":
        items.sort(key=lambda item: CORE_FILES.get(item.nodeid.partition("::")[0], 0.0), reverse=True)


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, since they live until the end.

    Otherwise each full collection takes a second, and code that allocates much, such as the conversion of a
    model, causes several.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a tenth of a run was spent in looking through what lives on


def pytest_runtest_teardown() -> None:
    """Let the children of later tests import from the checkout again, which a command that ran here forbids its own."""
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the packaged model converted for openvino, shared by all processes of the run.

    The conversion takes 6 s. The first test that needs it makes it; if two make it at once, one result is
    used.
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
