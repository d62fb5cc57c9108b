"""`vectormill worker`: one pinned Celery worker per model and device, each restarted when it dies.

Everything that must be known before torch is imported (visible devices, cores, threads) is in the child's environment.
"""

import logging
import signal
import sys
import threading
from collections.abc import Sequence

from vectormill.domain.errors import ConfigurationError
from vectormill.registry import Registry
from vectormill.settings import Settings, process_environment
from vectormill.supervisor import ChildSpec, Supervisor
from worker.devices.detect import detect_inventory
from worker.devices.device import Device, device_environment, parse_devices
from worker.settings import load_worker_settings

logger = logging.getLogger(__name__)

# Celery returns its slots and the engine hands its chunks back well within it.
_GRACE_SECONDS = 10.0


def run(settings: Settings, models: Sequence[str], devices: str | None = None) -> None:
    """Serves the models, or all registered ones, until SIGTERM or SIGINT.

    Raises ConfigurationError, UnknownModel or ModelError before it starts anything.
    """
    if settings.database_url is None or settings.redis_url is None:
        raise ConfigurationError(
            "A worker needs VECTORMILL_DATABASE_URL and VECTORMILL_REDIS_URL; `vectormill up` brings its own."
        )
    registry = Registry(settings.models)
    served = models or registry.names()
    for model in served:
        registry.card(model)
    worker_settings = load_worker_settings(devices=devices)
    chosen = parse_devices(worker_settings.devices, detect_inventory())
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    children = [_replica(model, device, worker_settings.devices) for model in served for device in chosen]
    supervisor = Supervisor(children, stopping=stopping)
    try:
        supervisor.start()
        stopping.wait()
    finally:
        supervisor.stop(_GRACE_SECONDS)


def _replica(model: str, device: Device, devices: str) -> ChildSpec:
    argv = (
        sys.executable,
        "-m",
        "worker.app",
        "--model",
        model,
        "--device",
        device.name,
        "--devices",
        devices,
    )
    return ChildSpec(f"{model} on {device.name}", argv, process_environment() | device_environment(device))
