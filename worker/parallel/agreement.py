"""Let the ranks of one model connect, agree on decisions, and find out whether packed attention is right on all.

Packed attention is compared with padding on all ranks at once before any rank uses it. Ranks that share a
model run every forward pass together: one that packs next to one that pads would wait for hidden states of
another shape, or add up values of different tokens; and one that leaves a pass midway because its kernel
raised leaves the others waiting. So a kernel that raises returns zeros, each rank completes the whole probe,
and only then do all exchange what they found.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from worker.batching.batch import Batch
from worker.devices.device import CPU, CUDA
from worker.model.forms import Form
from worker.model.packed import Kernel, find_deviation, first_line, make_attention
from worker.model.runtime import transformers
from worker.placement.placement import Rank

PROCESS_GROUPS: Final = {CPU: "gloo", CUDA: "nccl"}

# The number of questions asked so far. Ranks load the same models in the same order, so a number identifies a
# question.
_questions = count()
PROBED: Final = "vectormill_probed"

# Returns the hidden states [tokens, hidden size] that this rank ends up with for a probe; a stage returns its
# own.
Compute = Callable[[Form, Batch], Tensor]


class CapturingKernel:
    """A kernel that stores its first exception in `error` and returns zeros instead of raising it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.error: Exception | None = None

    def __call__(self, query: Tensor, *arguments: Any) -> Tensor:
        try:
            return self._kernel(query, *arguments)
        except Exception as error:  # noqa: BLE001 - a kernel that is missing or refuses a shape raises anything
            self.error = self.error or error
            return torch.zeros_like(query)


def find_flaw(
    transformer: nn.Module,
    padded: Form,
    packed: Form,
    kernel: Kernel,
    probes: Sequence[Batch],
    compute: Compute,
    ask_all: Callable[[str], str],
    *,
    has_last_states: bool,
) -> str:
    """Return what is wrong with packing, to complete a "because"; empty if nothing. The same on all ranks.

    The ranks first exchange whether kernels failed through `ask_all`, because the result of a failed kernel
    is missing on other ranks too. `has_last_states` is set if this rank ends up with the model's last hidden
    states, which depend on those of earlier stages. Raises ModelError if anything but the kernel ended the
    pass midway: the other ranks are then left waiting.
    """
    capturing = CapturingKernel(kernel)
    transformers.AttentionInterface.register(PROBED, make_attention(capturing))
    try:
        expected = [compute(padded, probe) for probe in probes]
        with attending(transformer, PROBED):
            found = [compute(packed, probe) for probe in probes]
        if found[0].is_cuda:
            torch.cuda.synchronize()  # a kernel's error is reported only by the next synchronization
    except Exception as error:
        raise ModelError(
            f"Packed attention broke a forward pass of this rank ({first_line(capturing.error or error)}) while the "
            "others wait for it; use padded attention."
        ) from error
    failed = "" if capturing.error is None else f"packed attention failed: {first_line(capturing.error)}"
    deviation = find_deviation(expected, found) if has_last_states else ""
    return ask_all(failed) or ask_all(
        f"packed attention deviates from padding: {deviation}" if deviation else ""
    )


@contextmanager
def attending(transformer: nn.Module, kernel: str) -> Iterator[None]:
    """Make the transformer attend with this kernel during the block."""
    before = str(transformer.config._attn_implementation)
    set_attention(transformer, kernel)
    try:
        yield
    finally:
        set_attention(transformer, before)


def set_attention(transformer: nn.Module, kernel: str) -> None:
    """Set the attention kernel of every layer; transformers' own function misses the layers of a stage."""
    for module in transformer.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = kernel


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
