"""The processes of a tree: which is which, and how much processor time each kind has used."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

import psutil

MODEL_PROCESS: Final = "model process"
CELERY_WORKER: Final = "Celery worker"
POSTGRES: Final = "postgres"
COMMANDS: Final = {"worker": "worker's launcher"}


def name_process(arguments: Sequence[str]) -> str:
    """What a process of ours is, from its command line."""
    # Of any commit: its folder has moved.
    if any("runner_process import main" in argument for argument in arguments):
        return MODEL_PROCESS
    if "worker.app" in arguments:
        return CELERY_WORKER
    if "vectormill.cli" in arguments[:-1]:
        command = arguments[list(arguments).index("vectormill.cli") + 1]
        return COMMANDS.get(command, command)
    if "flower" in arguments:
        return "flower"
    if not arguments:
        return "ended"
    # Servers write what they do over their command line: "postgres: checkpointer", "valkey-server 127.0.0.1:6379".
    return PurePath(re.split(r"[:\s]", arguments[0])[0]).name.removesuffix("-server")


def list_tree(pid: int) -> list[psutil.Process]:
    """The process and all below it, itself first."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def find_named(processes: Sequence[psutil.Process], name: str) -> list[psutil.Process]:
    """Those that `name_process` gives this name."""
    return [process for process in processes if name_process(_arguments(process)) == name]


def group_by_name(processes: Sequence[psutil.Process]) -> dict[str, list[psutil.Process]]:
    """All of them, by what `name_process` gives."""
    groups: defaultdict[str, list[psutil.Process]] = defaultdict(list)
    for process in processes:
        groups[name_process(_arguments(process))].append(process)
    return dict(groups)


def count_cpu_seconds(pid: int) -> dict[str, float]:
    """User and system time of the tree so far, by name.

    Time of children that ended and were waited for is their parent's: Postgres's short-lived processes are not lost,
    and the difference between two readings is exact, whichever processes ended in between.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in list_tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # macOS does not count what ended.
        ended = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        seconds[name_process(_arguments(process))] += times.user + times.system + ended
    return dict(seconds)


def subtract_readings(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Seconds between two readings, the busiest first.

    A name can come out negative when its process ended in between: its parent then has that time, and the sum is right.
    """
    spent = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {*after, *before}}
    return dict(sorted(spent.items(), key=lambda entry: (-entry[1], entry[0])))


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
