"""Tuner: tells the TokenBudget what batches cost and how full the devices are. Knows no texts and no chunks.

`max_batch_tokens` and the observing are called from the executor's thread; `describe` from any.
"""

import logging
import math
from typing import Any

from vectormill.models.model_card import ModelCard
from worker.batching.budget import SMALLEST_TOKENS, TokenBudget
from worker.batching.cost import BatchCost, PaddedCost
from worker.devices.device import Device
from worker.encoder.encoder import EncoderReport, find_changes
from worker.engine.batch_bounds import bound_batches, count_batch_parts, foresee_footprint, make_rules
from worker.engine.replica_memory import ReplicaMemory
from worker.engine.work import OwnedBatch
from worker.runner.memory import MemoryReport
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


class Tuner:
    """Answers the pool's question for the size of a batch, and learns from those that were encoded."""

    def __init__(
        self,
        card: ModelCard,
        device: Device,
        settings: WorkerSettings,
        sharing: Sharing | None = None,
    ) -> None:
        self._card = card
        self._device = device
        self._replica = None if sharing is None else sharing.replica
        self._memory = ReplicaMemory(device, sharing)
        self._budget = TokenBudget(make_rules(settings, device))
        self._cost: BatchCost = PaddedCost()
        self._report: EncoderReport | None = None
        self.num_out_of_memory = 0

    def begin(self, report: EncoderReport, memory: MemoryReport | None, cost: BatchCost) -> None:
        """Take over the costs and the free memory of an encoder that was loaded.

        One that is like the encoder before it keeps the sizes that were found; another one starts anew.
        """
        if self._report is not None and find_changes(self._report, report):
            self._budget.begin()
        self._cost, self._report, self._memory.report = cost, report, memory
        self._bound(report)

    def _bound(self, report: EncoderReport) -> None:
        """Limit batches to the memory that is free below the high watermark once the weights are loaded."""
        self._budget.forget_bound()
        footprint = foresee_footprint(self._card, report)
        if footprint is None or self._memory.report is None:
            return
        high_watermark = self._budget.rules.high_watermark
        free_bytes = self._memory.count_free_bytes(high_watermark)
        self._budget.largest_batch_tokens = bound_batches(
            footprint, free_bytes, count_batch_parts(self._replica)
        )
        if free_bytes <= 0:
            logger.warning(
                "%s is in use before the first batch, above the high watermark of %.0f %%; batches have %d tokens.",
                self._memory.fullest,
                100 * high_watermark,
                SMALLEST_TOKENS,
            )

    def max_batch_tokens(self, max_length: int) -> int:
        """Return the most that a batch may cost whose longest sequence is that long. A BudgetSource."""
        return self._budget.max_batch_tokens(max_length)

    @property
    def largest_batch_tokens(self) -> int:
        """Return the largest budget of all length classes."""
        sizes: list[int] = [budget["max_batch_tokens"] for budget in self._budget.describe().values()]
        return max(sizes)

    def observe_encoded(self, work: OwnedBatch, seconds: float, memory: MemoryReport | None) -> None:
        if memory is not None:
            self._memory.report = memory
            if self._budget.observe_memory(memory.used_share):
                logger.warning(
                    "%s is in use, more than the high watermark of %.0f %%: batches shrink.",
                    self._memory.fullest,
                    100 * self._budget.rules.high_watermark,
                )
        if not work.is_urgent:  # an urgent batch is short on purpose
            longest_alone = self._cost.of_sequence(work.length)
            self._budget.observe(
                work.length,
                num_tokens=work.batch.num_tokens,
                cost=self._count_cost(work),
                one_more=math.ceil(longest_alone),
                seconds=seconds,
                num_streams=self._report.num_streams if self._report is not None else 1,
            )

    def observe_out_of_memory(self, work: OwnedBatch, reason: str) -> None:
        """Count a batch that did not fit. Logged once, because a batch that is halved five times is one event."""
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

    def observe_killed(self, work: OwnedBatch) -> None:
        """Halve batches of such lengths after the process was killed for want of main memory."""
        logger.warning(
            "The model process was killed for want of memory during a batch of %d sequences of up to %d tokens: "
            "batches of such lengths are halved.",
            len(work.batch),
            work.batch.max_length,
        )
        self._budget.observe_out_of_memory(work.length, self._count_cost(work))

    def describe(self) -> dict[str, Any]:
        """Return budgets and memory for the worker's report."""
        return {
            "max_batch_tokens": self.largest_batch_tokens,
            "budgets": self._budget.describe(),
            **self._memory.describe(),
            "num_out_of_memory": self.num_out_of_memory,
            "num_budget_shrinks": self._budget.num_shrunk,
        }

    def _count_cost(self, work: OwnedBatch) -> int:
        """Return the cost of the batch as the pool counts it, so that a full one is recognized."""
        return math.floor(self._cost.of_batch(len(work.batch), work.length, work.sequences.cost_alone))
