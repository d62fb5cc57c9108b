"""Tuner: tells the TokenBudget what batches cost, and keeps on disk what it learned. Knows no texts and no chunks.

`max_batch_tokens` and the observing are called from the executor's thread; `describe` from any.
"""

import logging
import math
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from worker.batching.budget import SMALLEST_TOKENS, BudgetRules, EncodedBatch, TokenBudget
from worker.batching.budget_file import BudgetFile
from worker.batching.cost import BatchCost, PaddedCost
from worker.devices.device import CPU, Device
from worker.encoder.encoder import EncoderReport
from worker.execution.work import Work
from worker.placement.placement import Replica
from worker.placement.sizes.footprint import VALUE_BYTES, Footprint, make_footprint
from worker.placement.sizes.model_shape import read_model_shape
from worker.placement.strategies import FULLY_SHARDED
from worker.runner.memory import MemoryReport
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

# Where tuning starts: a GPU needs far more to do at once than a CPU, which keeps the memory of the largest batch it was
# tried with for a while, a batch for each of its streams.
CPU_BATCH_TOKENS: Final = 1024
ACCELERATOR_BATCH_TOKENS: Final = 32768


class Tuner:
    """Implements the executor's WorkObserver and answers the pool's question for the size of a batch."""

    def __init__(
        self,
        card: ModelCard,
        device: Device,
        settings: WorkerSettings,
        cache_dir: Path,
        sharing: Sharing | None = None,
    ) -> None:
        self._card = card
        self._device = device
        self._sharing = sharing
        self._cache_dir = cache_dir
        start_tokens = CPU_BATCH_TOKENS if device.kind == CPU else ACCELERATOR_BATCH_TOKENS
        self._budget = TokenBudget(
            BudgetRules(
                settings.max_batch_tokens or start_tokens,
                is_tuned=settings.max_batch_tokens is None,
                high_watermark=settings.memory_high_watermark,
                low_watermark=settings.memory_low_watermark,
            )
        )
        self._high_watermark = settings.memory_high_watermark
        self._file: BudgetFile | None = None
        self._cost: BatchCost = PaddedCost()
        self._memory: MemoryReport | None = None
        self.num_out_of_memory = 0

    def begin(self, report: EncoderReport, memory: MemoryReport | None, cost: BatchCost) -> None:
        """An encoder is loaded: what is left of the memory is known, and what batches of it were learned earlier. One
        that is as the former goes on with what was learned since.
        """
        self._cost = cost
        file = BudgetFile(
            self._cache_dir,
            {
                "model": self._card.name,
                "revision": self._card.revision,
                "device": f"{self._device.kind} {self._device.description}",
                "backend": report.backend.value,
                "precision": report.precision.value,
                "attention": report.attention,
                "threads": report.num_threads,
                "streams": report.num_streams,
                **({"shared": describe_sharing(self._sharing.replica)} if self._sharing else {}),
            },
        )
        if self._file is None or file.path != self._file.path:
            self._file = file
            self._budget.recall(file.load())
        self._memory = memory
        footprint = foresee_footprint(self._card, report)
        self._budget.forget_bound()
        if footprint is not None and memory is not None:
            self._bound(footprint, memory)

    def max_batch_tokens(self, max_length: int) -> int:
        """The most that a batch may cost whose longest sequence is that long. A BudgetSource."""
        return self._budget.max_batch_tokens(max_length)

    @property
    def largest_batch_tokens(self) -> int:
        """Of any length."""
        sizes: list[int] = [budget["max_batch_tokens"] for budget in self._budget.describe().values()]
        return max(sizes)

    def observe_encoded(self, work: Work, seconds: float, memory: MemoryReport | None) -> None:
        if memory is not None:
            self._memory = memory
            if self._budget.observe_memory(memory.used_share):
                logger.warning(
                    "%.0f %% of the memory of %s is in use, more than the high watermark of %.0f %%: batches shrink.",
                    100 * memory.used_share,
                    self._fullest(memory).name,
                    100 * self._high_watermark,
                )
        if not work.is_urgent:  # an urgent batch is short on purpose
            longest_alone = self._cost.of_sequence(work.length)
            self._budget.observe(
                EncodedBatch(
                    max_length=work.length,
                    num_tokens=work.batch.num_tokens,
                    cost=self._count_cost(work),
                    cost_alone=float(self._cost.of_sequences(work.batch.lengths).sum()),
                    one_more=math.ceil(longest_alone),
                    seconds=seconds,
                )
            )
        self._keep()

    def observe_out_of_memory(self, work: Work, reason: str) -> None:
        """Every time it is counted; said once, because a batch that is halved five times is one event."""
        if self.num_out_of_memory == 0:
            logger.warning(
                "%s has too little memory for a batch of %d sequences of up to %d tokens (%s). It is tried again in "
                "halves, and batches of such lengths are smaller from now on; further ones are only counted.",
                self._device.name,
                len(work.batch),
                work.batch.max_length,
                reason,
            )
        self.num_out_of_memory += 1
        self._budget.observe_out_of_memory(work.length, self._count_cost(work))
        self._keep()

    def observe_killed(self, work: Work) -> None:
        """Killed for want of main memory, by the kernel or whoever acts before it: the next ones shall be smaller."""
        logger.warning(
            "The model process was killed for want of memory during a batch of %d sequences of up to %d tokens: "
            "batches of such lengths are halved.",
            len(work.batch),
            work.batch.max_length,
        )
        self._budget.observe_out_of_memory(work.length, self._count_cost(work))
        self._keep()

    def describe(self) -> dict[str, Any]:
        """For the worker's report."""
        memory = self._memory or MemoryReport(0, 0, 0, 0.0)
        budgets = self._budget.describe()
        return {
            "max_batch_tokens": self.largest_batch_tokens,
            "budgets": budgets,
            **_describe_memory(memory),
            **self._describe_ranks(memory),
            "num_out_of_memory": self.num_out_of_memory,
            "num_budget_shrinks": self._budget.num_shrunk,
        }

    def _count_cost(self, work: Work) -> int:
        """What the batch cost in the pool's eyes, so that a full one is known as such."""
        return math.floor(self._cost.of_batch(len(work.batch), work.length, work.sequences.cost_alone))

    def _bound(self, footprint: Footprint, memory: MemoryReport) -> None:
        """No batch is larger than what was free below the high watermark when the weights were loaded.

        Where several devices share the model, on the one with the least; each has its part of a batch at a time.
        """
        free_bytes = min(
            int((self._high_watermark - used_share) * device.memory_bytes)
            for device, used_share in self._used_shares(memory)
        )
        num_parts = 1 if self._sharing is None else count_batch_parts(self._sharing.replica)

        def largest_batch_tokens(length: int) -> int:
            return max(SMALLEST_TOKENS, num_parts * footprint.largest_batch_tokens(free_bytes, length))

        self._budget.largest_batch_tokens = largest_batch_tokens
        if free_bytes <= 0:
            logger.warning(
                "%.0f %% of the memory of %s is in use before the first batch, above the high watermark of %.0f %%; "
                "batches have %d tokens.",
                100 * memory.used_share,
                self._fullest(memory).name,
                100 * self._high_watermark,
                SMALLEST_TOKENS,
            )

    def _used_shares(self, memory: MemoryReport) -> list[tuple[Device, float]]:
        """Of every device of the replica."""
        if self._sharing is None or not memory.ranks:
            return [(self._device, memory.used_share)]
        shares = [rank.used_share for rank in memory.ranks]
        return list(zip(self._sharing.devices, shares, strict=True))

    def _fullest(self, memory: MemoryReport) -> Device:
        return max(self._used_shares(memory), key=lambda used: used[1])[0]

    def _describe_ranks(self, memory: MemoryReport) -> dict[str, Any]:
        """For the worker's report, where several devices share the model."""
        if self._sharing is None:
            return {}
        ranks = zip(self._sharing.devices, memory.ranks, strict=False)  # none before the model is loaded
        return {
            "memory_of_ranks": [{"device": device.name, **_describe_memory(rank)} for device, rank in ranks]
        }

    def _keep(self) -> None:
        if self._budget.is_changed and self._file is not None:
            self._file.save(self._budget.learn())


def foresee_footprint(card: ModelCard, report: EncoderReport) -> Footprint | None:
    """None for a model whose files do not tell its sizes: then only out-of-memory and watermarks bound its batches."""
    precision = report.precision.value if report.precision.value in VALUE_BYTES else "fp32"
    try:
        return make_footprint(read_model_shape(card), precision, report.attention)
    except ModelError as error:
        logger.warning("The size of batches is found by trying: %s", error)
        return None


def count_batch_parts(replica: Replica) -> int:
    """In how many parts the devices of a replica have its batches: one after another, or each device one."""
    return len(replica.devices) if replica.strategy == FULLY_SHARDED else replica.micro_batches


def describe_sharing(replica: Replica) -> str:
    """What batches cost depends on it, and how many fit."""
    return f"{replica.strategy} over {len(replica.devices)}"


def _describe_memory(memory: MemoryReport) -> dict[str, Any]:
    return {
        "memory_bytes": memory.process_bytes,
        "peak_memory_bytes": memory.peak_process_bytes,
        "device_memory_bytes": memory.device_bytes,
        "memory_used_share": memory.used_share,
    }
