"""Let the ranks of one model find each other, and come to one decision. Knows no models and no batches."""

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

# Questions of this process so far. Ranks load the same models in the same order, so that a number is one question.
_questions = count()


def join_process_group(rank: Rank, backend: str) -> None:
    """Join the ranks and wait for all of them. A collective that exceeds the timeout raises on every rank.

    With NCCL it ends the process instead. The executor is faster in both cases, see Engine.

    NCCL is not told the device, and so makes communicators when they are first used: one for two stages that talk.
    Made at once, a single one would carry all that is sent and received, one after another on one stream, and no stage
    could send a micro-batch before it has received all of them. Source: c10d, ProcessGroupNCCL::pointToPoint.
    """
    if dist.is_initialized():  # by another model of this process
        return
    dist.init_process_group(
        backend,
        store=_open_store(rank.meeting_point, rank.world_size, rank.timeout_seconds),
        rank=rank.number,
        world_size=rank.world_size,
        timeout=timedelta(seconds=rank.timeout_seconds),
    )


def ask_all(rank: Rank, objection: str) -> str:
    """Return the objection of the first rank that has one, with the rank; empty if none has. The same on every rank.

    All ranks have to ask, and each waits for what all others say. It takes no collective, and so neither memory on a
    device nor a communicator. A rank that ends before it has spoken ends its group (worker.runner.runner_group), and
    the others with it.
    """
    store = dist.PrefixStore(
        f"question {next(_questions)}",
        _open_store(rank.meeting_point, rank.world_size, rank.timeout_seconds),
    )
    store.set(str(rank.number), objection)
    said = [store.get(str(number)).decode() for number in range(rank.world_size)]
    return find_first_objection(said)


def find_first_objection(said: Sequence[str]) -> str:
    """Return the first objection, in the order of the ranks."""
    return next((f"{word} (on rank {number})" for number, word in enumerate(said) if word), "")


@cache  # one for all that the ranks of a start say to each other: who closes one may delete its file
def _open_store(meeting_point: Path, world_size: int, timeout_seconds: float) -> dist.Store:
    store = dist.FileStore(str(meeting_point), world_size)
    store.set_timeout(timedelta(seconds=timeout_seconds))  # else 300 s, while others may still be starting
    return store
