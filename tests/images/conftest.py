"""Where no engine can be started, one line says so, and these tests are skipped."""

import pytest

from tests.images.engine import find_obstacle

OBSTACLE = find_obstacle()


def pytest_report_header() -> str:
    return f"images: not built and not run, because {OBSTACLE}" if OBSTACLE else "images: built and run"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if OBSTACLE and item.path.parent.name == "images":
            # Docker needs root and a kernel that allows it, which not every machine has; the reason is printed.
            item.add_marker(pytest.mark.skip(reason=OBSTACLE))
