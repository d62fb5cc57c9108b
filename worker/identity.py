"""The name of a worker, which no other live worker shares and which it keeps when it is restarted.

Several hosts may have one name (such as containers of one image), and several launchers may serve one model
on one host. So a name is registered in Postgres; only heartbeats distinguish a live worker from one that was
killed a moment ago.

EndedWorker describes a worker's process whose end its launcher saw, and what that says about the chunks it
held.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Self
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from vectormill.jobs.transitions import release_orphaned_chunks
from vectormill.workers.workers import beat_worker, find_last_beats, name_owner

logger = logging.getLogger(__name__)

# The largest number of workers with the same model, device and host name.
MAX_NAMESAKES = 1000
# The pause between two checks whether the worker with a name is alive or was killed.
_LOOK_SECONDS = 0.5
# Signals for faults of the process itself, as when a tokenizer's native code crashes on a text. SIGTERM comes
# from others, and so does SIGKILL, unless the kernel's counter says that it killed a process for lack of
# memory.
OWN_FAULTS: Final = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
_KERNEL: Final = "kernel"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The name under which a worker holds leases, which includes its device.

    `incarnation` changes at every start, `launcher` at every start of `vectormill worker`.
    """

    name: str
    incarnation: UUID
    launcher: UUID
    model: str
    slots: int

    @property
    def owner(self) -> str:
        return name_owner(self.name, self.incarnation)


def take_name(
    engine: Engine,
    identity: WorkerIdentity,
    report: Mapping[str, Any],
    wait: Callable[[float], object] = time.sleep,
) -> WorkerIdentity:
    """Register the worker under a free name, and return its identity with that name.

    The name is `model-cpu0@host`, or `model-cpu0.2@host` while a live worker of another launcher has the
    first. If the worker with a name sends another heartbeat, the next name is tried. If it sends none, it was
    killed, and its name is taken over some seconds later. Raises SQLAlchemyError if the database is not
    available.
    """
    stem, _, host = identity.name.rpartition("@")
    names = (f"{stem}.{number}@{host}" for number in range(2, MAX_NAMESAKES + 1))
    candidates = [identity, *(replace(identity, name=name) for name in names)]
    first_seen: dict[str, datetime] = {}
    while True:
        with engine.begin() as connection:
            last_beats = find_last_beats(connection, [candidate.name for candidate in candidates])
            first_seen = last_beats | first_seen
            for candidate in candidates:
                if beat_as(connection, candidate, report):
                    return candidate
                if last_beats.get(candidate.name) == first_seen.get(candidate.name):
                    break  # wait to see whether its worker still sends heartbeats
        wait(_LOOK_SECONDS)


def beat_as(connection: Connection, identity: WorkerIdentity, report: Mapping[str, Any]) -> bool:
    """Send a heartbeat under this identity. Return False if another live worker has its name."""
    return beat_worker(
        connection,
        identity.name,
        identity.incarnation,
        identity.model,
        identity.slots,
        report,
        identity.launcher,
    )


class FailureNotice:
    """Keeps a worker that cannot load its model in the list of workers, with the reason and without slots.

    So jobs can say why they wait, and no chunk is dispatched to the worker. Heartbeats are sent on a separate
    thread, also while loading is retried. `losses` returns a line for each lost GPU.
    """

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        seconds: float,
        losses: Callable[[], list[str]] = list,
    ) -> None:
        self._engine = engine
        self._identity = replace(identity, slots=0)
        self._seconds = seconds
        self._losses = losses
        self._report: Mapping[str, Any] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="failure notice", daemon=True)

    def tell(self, report: Mapping[str, Any]) -> None:
        """Send this report with heartbeats from now on."""
        self._report = {**report, "max_tokens_in_flight": 0}
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Stop the heartbeats. The worker's own next heartbeat replaces the last one."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        identity = None
        while not self._stopping.is_set():
            report = {**self._report, "lost_devices": self._losses()}
            try:
                if identity is None:
                    identity = take_name(self._engine, self._identity, report, self._stopping.wait)
                else:
                    with self._engine.begin() as connection:
                        beat_as(connection, identity, report)
            except SQLAlchemyError as error:
                logger.warning("Could not report that the model is not loaded: %s", error)
            self._stopping.wait(self._seconds)


@dataclass(frozen=True, slots=True)
class EndedWorker:
    """How a worker's process ended: its exit status, and whether the kernel killed it.

    `status` is that of subprocess, negative for a signal. `by_kernel` means that the kernel killed it for
    lack of memory.
    """

    incarnation: UUID
    status: int
    by_kernel: bool = False

    @classmethod
    def parse(cls, argument: str) -> Self:
        incarnation, _, end = argument.partition("=")
        status, _, killer = end.partition(",")
        return cls(UUID(incarnation), int(status), killer == _KERNEL)

    def __str__(self) -> str:
        return f"{self.incarnation}={self.status}" + (f",{_KERNEL}" if self.by_kernel else "")

    @property
    def is_evidence(self) -> bool:
        return self.by_kernel or -self.status in OWN_FAULTS

    @property
    def end(self) -> str:
        how = signal.Signals(-self.status).name if self.status < 0 else f"status {self.status}"
        return f"{how}, by the kernel for lack of memory" if self.by_kernel else how


def release_chunks_of(ended: Sequence[EndedWorker], engine: Engine) -> None:
    """Hand back the chunks that these processes held. If the database fails, their leases lapse later."""
    for worker in ended:
        reason = f"the worker's process ended with {worker.end}"
        try:
            num_chunks = release_orphaned_chunks(
                engine, worker.incarnation, reason, is_evidence=worker.is_evidence
            )
        except SQLAlchemyError as error:
            logger.warning(
                "Could not release the chunks of the previous process; they return when their leases lapse: %s",
                error,
            )
        else:
            if num_chunks:
                logger.warning(
                    "The previous process ended with %s; %d chunks will run again.", worker.end, num_chunks
                )
