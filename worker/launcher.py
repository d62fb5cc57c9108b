"""`vectormill worker`: plans the placement, starts a pinned Celery worker for each replica, and restarts it.

When a GPU is lost or back, the placement is planned anew.

A child's environment sets its number of threads. The child gets its replica and its devices from the plan,
GPUs with their UUIDs, and plans nothing itself. Only the model's own process cannot see other devices.
"""

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from rich.console import Console

from vectormill.domain.errors import ConfigurationError, ModelDoesNotFit, ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import Registry, open_registry
from vectormill.processes.stopping import StopSignals
from vectormill.processes.supervisor import ChildSpec, Supervisor
from vectormill.settings import Settings, process_environment
from worker.devices.control_groups import count_oom_kills
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, Inventory, thread_environment
from worker.devices.presence import GpuPresence
from worker.identity import EndedWorker
from worker.loading import LoadingDisplay
from worker.placement.placement import Assignment, draw_placement, part_json, write_assignment
from worker.placement.tenants import Planned
from worker.plan import plan_machine
from worker.settings import WorkerSettings, find_cache_dir, load_worker_settings

logger = logging.getLogger(__name__)

# A worker promises to stop within 60 s (docs/DEPLOY.md, "Stop"). A model process that hangs in a driver
# is abandoned after 25 s, and a running commit may wait 20 s for a lock.
GRACE_SECONDS = 55.0
# The largest number of earlier processes to report. A process that ends during its start may not have
# reported the one before.
MAX_ENDED = 8
# How often the GPUs are looked for, and how long after a change is seen it is looked for again.
LOOK_SECONDS = 60.0
CONFIRM_SECONDS = 5.0


def run(settings: Settings, models: Sequence[str], devices: str | None = None) -> None:
    """Serve these models, or all registered ones, until SIGTERM or SIGINT.

    Raises ConfigurationError, UnknownModel or ModelError before anything is started.
    """
    environment = process_environment(settings)
    worker_settings = load_worker_settings(devices=devices)
    presence = GpuPresence(detect_inventory(environment))
    cards = _read_cards(open_registry(settings), models)
    with StopSignals() as stopping, TemporaryDirectory(prefix="vectormill-launcher-") as folder:
        losses = Path(folder) / "losses"
        told = ("--launcher", str(uuid4()), "--losses", str(losses))
        follower = PlanFollower(
            presence,
            lambda: plan_left(cards, presence, worker_settings),
            lambda name, model, assignment: _replica(name, model, assignment, told, environment),
            losses,
            stopping,
        )
        try:
            follower.supervisor.start()
            if not all(name.strip().startswith(CPU) for name in worker_settings.devices.split(",")):
                watch = partial(follower.watch, partial(detect_inventory, environment))
                threading.Thread(target=watch, name="devices", daemon=True).start()
            follower.supervisor.wait()
        finally:
            follower.supervisor.stop(GRACE_SECONDS)


def plan_left(
    cards: Sequence[ModelCard], presence: GpuPresence, settings: WorkerSettings
) -> tuple[Planned, ...]:
    """Plan the models on the devices that are not lost. Raises the errors of `plan_machine`."""
    inventory, lost = presence.inventory, presence.describe_lost()
    names = [name for name in settings.devices.split(",") if name.partition("*")[0].strip() not in lost]
    # A model that was meant for GPUs is not moved to the processor.
    if lost and not (names and inventory.accelerators):
        raise ModelDoesNotFit("No GPU is left.")
    return plan_machine(cards, inventory, settings.model_copy(update={"devices": ",".join(names)}))


class PlanFollower:
    """The processes of all replicas, which follow the plan when GPUs are lost or back.

    `make_plan` plans anew; `make_spec` makes the process of a replica. Only the replicas that a new plan changes are
    restarted. If nothing fits on what is left, all processes stay, and those that end are restarted with growing
    pauses. The file `losses` has a line for each lost GPU, which the workers report.
    """

    def __init__(
        self,
        presence: GpuPresence,
        make_plan: Callable[[], Sequence[Planned]],
        make_spec: Callable[[str, str, Assignment], ChildSpec],
        losses: Path,
        stopping: threading.Event,
    ) -> None:
        self._presence = presence
        self._make_plan = make_plan
        self._make_spec = make_spec
        self._losses = losses
        self._stopping = stopping
        self._woken = threading.Event()
        self._is_behind = False
        self._running = self._plan()
        children = [self._start(name, *planned) for name, planned in self._running.items()]
        # With several children, their bars would overwrite each other.
        if len(children) == 1 and sys.stderr.isatty():
            children = [replace(children[0], argv=(*children[0].argv, "--bar"))]
        self.supervisor = Supervisor(children, stopping=stopping)

    def watch(self, detect: Callable[[], Inventory]) -> None:
        """Look for lost and new GPUs every minute and whenever a process ends, until a stop is requested."""
        while not self._stopping.is_set():
            if self._presence.is_in_doubt:
                self._stopping.wait(CONFIRM_SECONDS)
            else:
                self._woken.wait(LOOK_SECONDS)
            self._woken.clear()
            try:
                if not self._stopping.is_set():
                    self.look(detect(), datetime.now(UTC))
            except Exception:  # a driver or a plan may fail in any way; what runs goes on
                logger.exception("Could not follow the GPUs. The next look tries again.")

    def look(self, found: Inventory, now: datetime) -> None:
        """Follow what is found if it differs from what was planned for, or if that could not be followed before."""
        self._is_behind |= self._presence.compare(found, now)
        if self._is_behind:
            self._follow()
            self._is_behind = False

    def _follow(self) -> None:
        """Plan anew, and restart the replicas that this changes. After an error it can be called again."""
        remedy = "the plan leaves it out until it is back."
        try:
            planned = self._plan()
        except (ConfigurationError, ModelError) as error:
            planned = self._running
            remedy = f"nothing fits without it, so what runs is kept until it is back: {error}"
        lost = self._presence.describe_lost().values()
        lines = [f"On {socket.gethostname()}, {each}; {remedy}" for each in lost]
        logger.warning("Planned anew. %s", " ".join(lines) or "All GPUs are there.")
        staying = {name: each for name, each in self._running.items() if _is_same(each, planned.get(name))}
        coming = [self._start(name, *each) for name, each in planned.items() if name not in staying]
        self._running = staying  # until all others run
        self.supervisor.change(self.supervisor.pids.keys() - staying, coming, GRACE_SECONDS)
        self._running = planned | staying
        self._losses.write_text("".join(f"{line}\n" for line in lines))

    def _plan(self) -> dict[str, tuple[str, Assignment]]:
        """Return the model and the assignment of each replica, by the name of its process."""
        found = {}
        for planned in self._make_plan():
            logger.info("Placement of %s:\n%s", planned.name, draw_placement(planned.placement))
            for each in assign_replicas(planned):
                names = ",".join(device.name for device in each.devices)
                found[f"{planned.name} on {names}"] = planned.name, each
        return found

    def _start(self, name: str, model: str, assignment: Assignment) -> ChildSpec:
        return make_process_spec(self._make_spec(name, model, assignment), on_end=self._woken.set)


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


def _is_same(one: tuple[str, Assignment], other: tuple[str, Assignment] | None) -> bool:
    """Return True if a replica runs on as it is, whatever the new plan says of the others."""
    if other is None or one[1].devices != other[1].devices:
        return False
    before, now = one[1].replica, other[1].replica
    return replace(before, relative_rate=now.relative_rate) == now


def _replica(
    name: str, model: str, assignment: Assignment, told: Sequence[str], environment: Mapping[str, str]
) -> ChildSpec:
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
        *told,
    )
    threads = thread_environment(first.num_threads, first.num_tokenizer_threads)
    return ChildSpec(name, argv, {**environment, **threads})


def make_process_spec(
    replica: ChildSpec, ended: tuple[EndedWorker, ...] = (), on_end: Callable[[], object] = lambda: None
) -> ChildSpec:
    """Return the replica as a new process, with arguments that say how earlier processes ended.

    Only the launcher sees how its processes end; it calls `on_end` then.
    """
    incarnation = uuid4()
    num_kills = count_oom_kills()
    told = tuple(f"--ended={worker}" for worker in ended)

    def succeed(status: int) -> ChildSpec:
        on_end()
        by_kernel = status == -signal.SIGKILL and (count_oom_kills() or 0) > (num_kills or 0)
        former = (*ended, EndedWorker(incarnation, status, by_kernel))[-MAX_ENDED:]
        return make_process_spec(replica, former, on_end)

    return replace(replica, argv=(*replica.argv, f"--incarnation={incarnation}", *told), succeed=succeed)


def prepare(card: ModelCard, settings: Settings) -> dict[str, Any] | None:
    """Load the model on the first of the planned devices, and return the report of the engine, as of a worker.

    Return None without loading it if several devices share it; such a model needs no conversion. A conversion for
    openvino stays in the cache directory. Raise ModelDoesNotFit and ModelError.
    """
    from worker.engine.engine import Engine  # imported late: the launcher itself loads no model

    worker_settings = load_worker_settings()
    (planned,) = plan_machine([card], detect_inventory(), worker_settings)
    devices = assign_replicas(planned)[0].devices
    if len(devices) > 1:
        return None
    display = LoadingDisplay(card.name, Console(stderr=True) if sys.stderr.isatty() else None)
    engine = Engine(card, devices[0], worker_settings, find_cache_dir(settings), display=display)
    try:
        engine.start()
        return engine.report()
    finally:
        engine.stop()
