"""Chaos: a plan of random kills and stops, derived from a seed, and its execution on a running stack."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.acceptance.stack import Stack

KILL, STOP = "SIGKILL", "SIGSTOP"
# Name of a role -> how often it is hurt relative to others, and the word that identifies its processes.
# Servers are hurt less often, because each of their ends costs every other process its connections.
ROLES = {
    "runner": (5, "runner_process"),
    "worker": (4, "worker.app"),
    "launcher": (1, "vectormill.cli worker"),
    "scheduler": (3, "vectormill.cli scheduler"),
    "indexer": (1, "vectormill.cli indexer"),
    "api": (3, "vectormill.cli api"),
    "flower": (1, "flower"),
    "valkey": (1, "valkey-server"),
    "postgres": (1, "postgres"),
}
MEAN_PAUSE_SECONDS = 1.8
# From a short hiccup to well beyond the lease of 5 s.
STOP_SECONDS = (0.2, 11.0)
KILL_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject: `seconds` after the start, a process of the role is killed or stopped for a while.

    `pick` in [0, 1) selects one of the role's processes.
    """

    seconds: float
    role: str
    kind: str
    pick: float
    stopped_seconds: float = 0.0

    def __str__(self) -> str:
        what = KILL if self.kind == KILL else f"{STOP} for {self.stopped_seconds:.1f} s"
        return f"{self.seconds:6.1f} s  {self.role:9}  {what}"


def plan_faults(seed: int, seconds: float) -> list[Fault]:
    """Return the faults for a seed, always the same ones; a longer plan begins with the shorter one."""
    dice = random.Random(seed)
    faults: list[Fault] = []
    now = dice.expovariate(1 / MEAN_PAUSE_SECONDS)
    while now < seconds:
        role = dice.choices(list(ROLES), [weight for weight, _ in ROLES.values()])[0]
        kind = KILL if dice.random() < KILL_SHARE else STOP
        faults.append(
            Fault(now, role, kind, dice.random(), dice.uniform(*STOP_SECONDS) if kind == STOP else 0.0)
        )
        now += dice.expovariate(1 / MEAN_PAUSE_SECONDS)
    return faults


def find_role(stack: Stack, role: str) -> list[psutil.Process]:
    """Return the role's processes in the order of their arguments, which unlike pids a replay repeats."""
    word = ROLES[role][1]
    found = []
    for process in stack.processes()[1:]:
        with suppress(psutil.Error):
            arguments = " ".join(process.cmdline())
            # The Postgres server itself: its sessions are its children.
            if (process.name() == word if role in ("valkey", "postgres") else word in arguments) and (
                role != "postgres" or " -D " in arguments
            ):
                found.append((arguments, process.pid, process))
    return [process for *_, process in sorted(found, key=lambda each: each[:2])]


class Nemesis:
    """The executor of a plan of faults on a stack.

    A stopped process continues when its time is over, or at the end.
    """

    def __init__(self, stack: Stack, plan: Sequence[Fault], clock: Callable[[], float]) -> None:
        self._stack = stack
        self._plan = plan
        self._clock = clock
        self._stopped: list[tuple[float, list[psutil.Process]]] = []  # when to continue which
        self.done: list[str] = []

    def run(self) -> None:
        """Carry out the plan and return; no process is stopped any more then."""
        began = self._clock()
        try:
            for fault in self._plan:
                while (now := self._clock() - began) < fault.seconds:
                    next_end = min((end for end, _ in self._stopped), default=fault.seconds)
                    time.sleep(max(0.01, min(fault.seconds, next_end) - now))  # the plan's own pauses
                    self._continue(self._clock() - began)
                self._inflict(fault)
        finally:
            self._continue(float("inf"))

    def _inflict(self, fault: Fault) -> None:
        victims = find_role(self._stack, fault.role)
        if not victims:
            self.done.append(f"{fault}  (none there)")
            return
        victim = victims[int(fault.pick * len(victims))]
        self.done.append(f"{fault}  pid {victim.pid}")
        if fault.kind == KILL:
            with suppress(psutil.Error):  # the process ended meanwhile
                victim.kill()
            return
        # A server is stopped with all its processes, as on a machine that stands still.
        frozen = [victim, *_children(victim)] if fault.role == "postgres" else [victim]
        for process in frozen:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)
        self._stopped.append((fault.seconds + fault.stopped_seconds, frozen))

    def _continue(self, now: float) -> None:
        for _, processes in [each for each in self._stopped if each[0] <= now]:
            for process in processes:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGCONT)
        self._stopped = [each for each in self._stopped if each[0] > now]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []
