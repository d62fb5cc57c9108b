"""Ranks: processes that run one program side by side, forked from one that has loaded torch."""

import os
from collections.abc import Callable, Mapping, Sequence

from tests.forking import FORKS

# For ranks that hang. On a machine that is busy with something else they take many times as long as on an idle one.
_TIMEOUT_SECONDS = 900


def run_ranks(
    program: Callable[..., None], calls: Sequence[tuple[object, ...]], environment: Mapping[str, str]
) -> None:
    """Runs `program(*call)` for all calls at once, each in a process of its own with one thread, to the end."""
    processes = [FORKS.Process(target=_run, args=(program, call, dict(environment))) for call in calls]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(_TIMEOUT_SECONDS)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(program: Callable[..., None], call: tuple[object, ...], environment: dict[str, str]) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    program(*call)
