"""Let the ranks of one model connect and agree on decisions."""

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final

import torch.distributed as dist

from worker.devices.device import CPU, CUDA
from worker.placement.placement import Rank

PROCESS_GROUPS: Final = {CPU: "gloo", CUDA: "nccl"}

# The number of questions asked so far. Ranks load the same models in the same order, so a number identifies a
# question.
_questions = count()


def join_process_group(rank: Rank, backend: str) -> None:
    """Connect the ranks and wait for all of them. A collective that exceeds the timeout raises on every rank.

    With NCCL such a collective ends the process instead. The executor detects a hang earlier in both cases,
    see Engine.

    NCCL is not given the device, so it creates communicators on first use: one per pair of communicating
    stages. If it created a single one at once, that would carry all transfers in order on one stream, and a
    stage that receives the next batch could not send the one before. Source: c10d,
    ProcessGroupNCCL::pointToPoint.
    """
    if dist.is_initialized():  # another model of this process has done it
        return
    dist.init_process_group(
        backend,
        store=_open_store(rank.meeting_point, rank.world_size, rank.timeout_seconds),
        rank=rank.number,
        world_size=rank.world_size,
        timeout=timedelta(seconds=rank.timeout_seconds),
    )


def ask_all(rank: Rank, objection: str) -> str:
    """Return the objection of the first rank that has one, with its number; empty if none.

    The same on every rank.

    All ranks have to call this, and each waits for all others. It uses no collective, and so neither device
    memory nor a communicator. If a rank ends before it has answered, worker.runner.runner_group ends the
    whole group.
    """
    store = dist.PrefixStore(
        f"question {next(_questions)}",
        _open_store(rank.meeting_point, rank.world_size, rank.timeout_seconds),
    )
    store.set(str(rank.number), objection)
    said = [store.get(str(number)).decode() for number in range(rank.world_size)]
    return find_first_objection(said)


def find_first_objection(said: Sequence[str]) -> str:
    """Return the first objection in the order of the ranks, with the rank's number; empty if none."""
    return next((f"{word} (on rank {number})" for number, word in enumerate(said) if word), "")


@cache  # one store per start for all exchanges of its ranks: closing one may delete its file
def _open_store(meeting_point: Path, world_size: int, timeout_seconds: float) -> dist.Store:
    store = dist.FileStore(str(meeting_point), world_size)
    store.set_timeout(timedelta(seconds=timeout_seconds))  # the default is 300 s
    return store
