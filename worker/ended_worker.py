"""EndedWorker: a worker's process that its launcher saw end, and what that tells of the chunks that it held."""

import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self
from uuid import UUID

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from vectormill.jobs.chunks.crash_recovery import release_orphaned_chunks

logger = logging.getLogger(__name__)

# Faults of the process itself, as when a tokenizer's native code fails on a text. SIGTERM comes from others, and so
# does SIGKILL, unless the kernel counts that it killed for want of memory.
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
class EndedWorker:
    """`status` is that of subprocess: negative for a signal. `by_kernel`: it was killed for want of memory."""

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
        return f"{how}, by the kernel for want of memory" if self.by_kernel else how


def release_chunks_of(ended: Sequence[EndedWorker], engine: Engine) -> None:
    """Hand back the chunks that these processes held. Without a database their leases lapse."""
    for worker in ended:
        reason = f"the worker's process ended with {worker.end}"
        try:
            num_chunks = release_orphaned_chunks(
                engine, worker.incarnation, reason, is_evidence=worker.is_evidence
            )
        except SQLAlchemyError as error:
            logger.warning("Chunks of the process that ended return when their leases lapse: %s", error)
        else:
            if num_chunks:
                logger.warning(
                    "The process before this one ended with %s; %d chunks run again.", worker.end, num_chunks
                )
