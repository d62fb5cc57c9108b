"""`vectormill worker`: plans the placement, starts a pinned Celery worker for each replica, and restarts it.

A child's environment sets its number of threads. The child gets its replica and its devices from the plan,
GPUs with their UUIDs, and plans nothing itself. Only the model's own process cannot see other devices.
"""

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID, uuid4

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import Registry, open_registry
from vectormill.processes.stopping import StopSignals
from vectormill.processes.supervisor import ChildSpec, Supervisor
from vectormill.settings import Settings, process_environment
from worker.devices.control_groups import count_oom_kills
from worker.devices.detect import detect_inventory
from worker.devices.device import thread_environment
from worker.identity import EndedWorker
from worker.placement.placement import Assignment, draw_placement, part_json, write_assignment
from worker.placement.together import Planned
from worker.plan import plan_machine
from worker.settings import load_worker_settings

logger = logging.getLogger(__name__)

# A worker promises to stop within 60 s (docs/DEPLOY.md, "Stop"). A model process that hangs in a driver
# is abandoned after 25 s, and a running commit may wait 20 s for a lock.
GRACE_SECONDS = 55.0
# The largest number of earlier processes to report. A process that ends during its start may not have
# reported the one before.
MAX_ENDED = 8


def run(settings: Settings, models: Sequence[str], devices: str | None = None) -> None:
    """Serve these models, or all registered ones, until SIGTERM or SIGINT.

    Raises ConfigurationError, UnknownModel or ModelError before anything is started.
    """
    environment = process_environment(settings)
    worker_settings = load_worker_settings(devices=devices)
    inventory = detect_inventory()
    launcher = uuid4()
    cards = _read_cards(open_registry(settings), models)
    children = []
    for planned in plan_machine(cards, inventory, worker_settings):
        logger.info("Placement of %s:\n%s", planned.name, draw_placement(planned.placement))
        children += [_replica(planned.name, each, launcher, environment) for each in assign_replicas(planned)]
    # With several children, their bars would overwrite each other.
    if len(children) == 1 and sys.stderr.isatty():
        children = [replace(children[0], argv=(*children[0].argv, "--bar"))]
    with StopSignals() as stopping:
        supervisor = Supervisor([make_process_spec(child) for child in children], stopping=stopping)
        try:
            supervisor.start()
            supervisor.wait()
        finally:
            supervisor.stop(GRACE_SECONDS)


def _read_cards(registry: Registry, models: Sequence[str]) -> list[ModelCard]:
    """Return the cards of these models, or of all registered ones without those that cannot be served.

    Raise UnknownModel, or the ModelError of one that was named or of the only one.
    """
    found = registry.cards(models or registry.names(), weights=True)
    cards = [card for card in found.values() if isinstance(card, ModelCard)]
    for name, error in found.items():
        if isinstance(error, ModelError):
            if models or not cards:
                raise error
            logger.error("The model %s is not served: %s", name, error)
    return cards


def assign_replicas(planned: Planned) -> list[Assignment]:
    """Return the assignment of each replica's worker."""
    devices = {device.name: device for device in planned.devices}
    return [
        Assignment(part_json(planned.placement, replica), tuple(devices[name] for name in replica.devices))
        for replica in planned.placement.replicas
    ]


def _replica(model: str, assignment: Assignment, launcher: UUID, environment: Mapping[str, str]) -> ChildSpec:
    """Return the Celery worker of one replica, with as many threads as its first device has.

    Model processes have their own threads.
    """
    first = assignment.devices[0]
    argv = (
        sys.executable,
        "-m",
        "worker.app",
        "--model",
        model,
        "--assignment",
        write_assignment(assignment),
        "--launcher",
        str(launcher),
    )
    threads = thread_environment(first.num_threads, first.num_tokenizer_threads)
    names = ",".join(device.name for device in assignment.devices)
    return ChildSpec(f"{model} on {names}", argv, {**environment, **threads})


def make_process_spec(replica: ChildSpec, ended: tuple[EndedWorker, ...] = ()) -> ChildSpec:
    """Return the replica as a new process, with arguments that say how earlier processes ended.

    Only the launcher sees how its processes end.
    """
    incarnation = uuid4()
    num_kills = count_oom_kills()
    told = tuple(f"--ended={worker}" for worker in ended)

    def succeed(status: int) -> ChildSpec:
        by_kernel = status == -signal.SIGKILL and (count_oom_kills() or 0) > (num_kills or 0)
        return make_process_spec(replica, (*ended, EndedWorker(incarnation, status, by_kernel))[-MAX_ENDED:])

    return replace(replica, argv=(*replica.argv, f"--incarnation={incarnation}", *told), succeed=succeed)
