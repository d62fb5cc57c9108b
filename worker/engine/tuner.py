"""Tuner chooses how large batches may be, from the model's files, the time of batches and the memory in use.

BatchMemory predicts the memory that batches take on each device, and corrects that by what they really take.

It passes these to the TokenBudget, which decides, and knows nothing about texts or chunks. The executor's
thread calls `max_batch_tokens` and the observe methods; any thread may call `describe`.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.jobs.chunk import LARGEST_CHUNK_TOKENS
from vectormill.models.model_card import ModelCard
from worker.batching.batch import Batch, OwnedBatch
from worker.batching.budget import SMALLEST_TOKENS, BudgetRules, TokenBudget
from worker.batching.cost import BatchCost, LengthBuckets, find_quadratic_length
from worker.devices.device import CPU, Device
from worker.encoder.choice import find_arithmetic
from worker.encoder.encoder import EncoderReport, find_changes
from worker.placement.footprint import (
    VALUE_BYTES,
    WHOLE,
    Footprint,
    count_results,
    list_shares,
    make_footprint,
)
from worker.placement.placement import Replica
from worker.placement.strategies import STRATEGIES
from worker.runner.memory import MemoryReport
from worker.runner.starter import Sharing
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

# The batch size with which tuning starts. A CPU keeps the memory of the largest batch tried for a while, once for each
# of its streams. A GPU has doubled it four times after as many batches as take a tenth of a second, unless it needs
# seconds for each: 70 billion weights in four stages.
CPU_BATCH_TOKENS: Final = 1024
ACCELERATOR_BATCH_TOKENS: Final = 2048
# By the planner's rates (worker.placement.replicas) a GPU reaches nine tenths of its rate with so many.
LEAST_ACCELERATOR_TOKENS: Final = 8192
# Full batches that are kept in flight for each batch that the device works at: four that it computes or that
# wait for it, and as many in chunks that are being dispatched, claimed, tokenized or committed.
BATCHES_IN_FLIGHT: Final = 8
# Where padding is computed, batches are full only if there are many sequences to choose similar lengths from:
# with paragraphs and 8,192 tokens in a batch, batches are filled to 0.27 with 16 batches in flight and to
# 0.44 with 32.
PADDED_BATCHES_IN_FLIGHT: Final = 32
# The minimum, however small batches are: one chunk that is encoded, one that is committed and one that is
# dispatched.
LEAST_TOKENS_IN_FLIGHT: Final = 3 * LARGEST_CHUNK_TOKENS
_MOST_TOKENS_IN_FLIGHT: Final = (1 << 31) - 1  # the largest integer of Postgres

NO_MEMORY: Final = MemoryReport(0, 0, 0, 0.0)
# A batch tells how well its memory was predicted if it was to take this share of what is free. In a smaller one, what
# kernels take whatever its size weighs more.
LEAST_SHARE: Final = 1 / 4
# A correction loses this share with each report of batches that took less: half of it in three minutes.
FADING: Final = 0.001
# A factor by which what was logged has to be exceeded, so that not every other batch is logged.
SMALLEST_CHANGE: Final = 1.02


class Tuner:
    """Tells the pool the largest size of a batch, and learns from batches that were encoded."""

    def __init__(
        self,
        card: ModelCard,
        device: Device,
        settings: WorkerSettings,
        sharing: Sharing | None = None,
        query_timeout_seconds: float = math.inf,
    ) -> None:
        """Begin with the batch size that the user gave, which is not tuned, or with a tuned default.

        A query, which waits for the batches before it, is to be answered within `query_timeout_seconds`.
        """
        self._query_timeout_seconds = query_timeout_seconds
        self._card = card
        self._replica = None if sharing is None else sharing.replica
        self._devices = (device,) if sharing is None else sharing.devices
        least_tokens = CPU_BATCH_TOKENS if device.kind == CPU else LEAST_ACCELERATOR_TOKENS
        start_tokens = min(least_tokens, ACCELERATOR_BATCH_TOKENS)
        self._budget = TokenBudget(
            BudgetRules(
                settings.max_batch_tokens or start_tokens,
                is_tuned=settings.max_batch_tokens is None,
                high_watermark=settings.memory_high_watermark,
                low_watermark=settings.memory_low_watermark,
                least_tokens=least_tokens,
            )
        )
        self._cost = BatchCost()
        self._report: EncoderReport | None = None
        self._memory: MemoryReport | None = None  # the newest report
        self._predicted: BatchMemory | None = None  # for the loaded encoder
        self._free_bytes: list[int] = []  # of each device below the watermark, once the weights are loaded
        self.num_out_of_memory = 0

    def begin(self, report: EncoderReport, memory: MemoryReport | None, cost: BatchCost) -> None:
        """Adopt the cost model and the free memory of a newly loaded encoder.

        If the encoder is like the one before it, the tuned sizes are kept; otherwise tuning starts again.
        """
        if self._report is not None and find_changes(self._report, report):
            self._budget.begin()
        self._cost, self._report, self._memory = cost, report, memory
        # A query waits for a batch in each stage and one ahead, of which the last passes through all stages, if all of
        # them came at once. Workers that share a GPU compute in turn.
        turns = (2 * report.num_stages + 1) * self._devices[0].num_parts
        self._budget.longest_seconds = self._query_timeout_seconds / turns
        # Limit batches to the memory below the high watermark that is free once the weights are loaded.
        self._budget.forget_bound()
        self._predicted = BatchMemory(self._card, report, self._devices, self._replica)
        if not self._predicted.footprints or self._memory is None:
            return
        high_watermark = self._budget.rules.high_watermark
        # The free memory of each device; negative if it uses more than the watermark.
        self._free_bytes = [
            int((high_watermark - used) * device.memory_bytes) for device, used in self._used_shares()
        ]
        self._budget.largest_batch_tokens = self._predicted.bound(self._free_bytes)
        if min(self._free_bytes) <= 0:
            logger.warning(
                "%s is in use before the first batch, above the high watermark of %.0f %%; "
                "batches are limited to %d tokens.",
                self._fullest,
                100 * high_watermark,
                SMALLEST_TOKENS,
            )

    def max_batch_tokens(self, max_length: int) -> int:
        """Return the largest cost of a batch whose longest sequence has `max_length` tokens.

        The pool uses this method as its BudgetSource.
        """
        return self._budget.max_batch_tokens(max_length)

    @property
    def largest_batch_tokens(self) -> int:
        """Return the largest budget of all length classes."""
        sizes: list[int] = [budget["max_batch_tokens"] for budget in self._budget.describe().values()]
        return max(sizes)

    @property
    def max_tokens_in_flight(self) -> int:
        """Return how many tokens of bulk the worker wants at once: waiting, tokenized or computed."""
        num_started = 1 if self._report is None else self._report.num_started
        likes_lengths = self._cost.pads or self._cost.tile_tokens > 0
        return choose_tokens_in_flight(self.largest_batch_tokens, num_started, pads=likes_lengths)

    def note(self, batch: Batch) -> None:
        """Remember a batch that has ended, whatever its outcome: the next report has the memory that it took."""
        if self._predicted is not None:
            length = self._cost.find_length(batch.max_length)
            self._predicted.note(len(batch) * length if self._cost.pads else batch.num_tokens, length)

    def observe_encoded(self, work: OwnedBatch, seconds: float, memory: MemoryReport | None) -> None:
        """Adapt the budget to the seconds of an encoded batch and to the reported memory; `note` was called with it."""
        if memory is not None:
            self._memory = memory
            if self._free_bytes and self._predicted is not None:
                self._predicted.correct(memory)
                self._budget.largest_batch_tokens = self._predicted.bound(self._free_bytes)
            if self._budget.observe_memory(memory.used_share):
                logger.warning(
                    "%s is in use, above the high watermark of %.0f %%; shrinking batches.",
                    self._fullest,
                    100 * self._budget.rules.high_watermark,
                )
        if not work.is_urgent:  # urgent batches are short on purpose and say nothing
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
        """Count a batch that ran out of memory.

        Only the first is logged, because a batch halved five times is one event.
        """
        if self.num_out_of_memory == 0:
            logger.warning(
                "%s has too little memory for a batch of %d sequences of up to %d tokens (%s). It is tried again in "
                "parts, and batches of such lengths are smaller from now on; further such errors are only counted.",
                self._devices[0].name,
                len(work.batch),
                work.batch.max_length,
                reason,
            )
        self.num_out_of_memory += 1
        self._budget.observe_out_of_memory(work.length, self._count_cost(work))

    def describe(self) -> dict[str, Any]:
        """Return budgets and memory for the worker's report.

        If devices share the model, the memory of each rank is included.
        """
        memory = self._memory or NO_MEMORY
        described = {
            "max_batch_tokens": self.largest_batch_tokens,
            "budgets": self._budget.describe(),
            **_describe_memory(memory),
            "num_out_of_memory": self.num_out_of_memory,
            "num_budget_shrinks": self._budget.num_shrunk,
        }
        if self._replica is not None:
            # There are no reports of ranks before the model is loaded.
            ranks = zip(self._devices, memory.ranks, strict=False)
            described["memory_of_ranks"] = [
                {"device": device.name, **_describe_memory(rank)} for device, rank in ranks
            ]
        return described

    def _used_shares(self) -> list[tuple[Device, float]]:
        """Return the used share of each device of the replica, or of the first if no rank reported."""
        memory = self._memory or NO_MEMORY
        reports = zip(self._devices, memory.ranks or (memory,), strict=False)
        return [(device, report.used_share) for device, report in reports]

    @property
    def _fullest(self) -> str:
        """Return a phrase about the fullest device, such as "95 % of the memory of cuda:0"."""
        device, used_share = max(self._used_shares(), key=lambda used: used[1])
        return f"{100 * used_share:.0f} % of the memory of {device.name}"

    def _count_cost(self, work: OwnedBatch) -> int:
        """Return the cost of the batch as the pool counts it, so that a full batch is recognized as full."""
        return math.floor(self._cost.of_batch(len(work.batch), work.length, work.sequences.cost_alone))


def _describe_memory(memory: MemoryReport) -> dict[str, Any]:
    return {
        "memory_bytes": memory.process_bytes,
        "peak_memory_bytes": memory.peak_process_bytes,
        "device_memory_bytes": memory.device_bytes,
        "memory_used_share": memory.used_share,
    }


def choose_tokens_in_flight(batch_tokens: int, num_started: int, *, pads: bool) -> int:
    """Return how many tokens a worker wants in flight.

    The device works at `num_started` batches at a time.
    """
    num_batches = PADDED_BATCHES_IN_FLIGHT if pads else BATCHES_IN_FLIGHT
    wanted = max(num_batches * num_started * batch_tokens, LEAST_TOKENS_IN_FLIGHT)
    return min(wanted, _MOST_TOKENS_IN_FLIGHT)


def find_batch_cost(card: ModelCard, report: EncoderReport) -> BatchCost:
    """Return the cost model of this encoder.

    If the model's sizes are unknown, a long sequence costs no extra.
    """
    try:
        shape = card.find_shape()
    except ModelError as error:
        logger.warning(
            "The cost of long sequences is unknown, so they are counted like short ones: %s", error
        )
        quadratic_length, holds_squares = math.inf, False
    else:
        holds_squares = shape.num_relative_positions > 0
        quadratic_length = find_quadratic_length(
            shape.hidden_size,
            shape.num_heads * shape.head_size,
            shape.num_key_value_heads * shape.head_size,
            shape.intermediate_size,
            is_gated=shape.is_gated,
            has_relative_scores=holds_squares,
        )
    if report.is_packed:
        return BatchCost(quadratic_length, pads=False)
    longest = report.longest_bucket
    buckets = None if longest is None else LengthBuckets(longest)
    tile_tokens = report.tile_tokens
    return BatchCost(quadratic_length, buckets, holds_squares, pads=not tile_tokens, tile_tokens=tile_tokens)


class BatchMemory:
    """The memory of batches on each device. Without a replica the model is whole on the one device.

    `footprints` is empty if the model's files do not state its sizes: then only errors and watermarks limit batches.
    On devices whose allocator tells what tensors took, a large batch that took more than was predicted corrects all
    predictions for that device by the same factor, which fades while others take less.
    """

    def __init__(
        self, card: ModelCard, report: EncoderReport, devices: Sequence[Device], replica: Replica | None
    ) -> None:
        self.footprints = _predict(card, report, devices, replica)
        is_divided = replica is not None and STRATEGIES[replica.strategy].divides_batches
        self._num_parts = len(devices) if is_divided else 1
        self._pads = not report.is_packed
        self._names = [device.name for device in devices]
        self._excess = [1.0] * len(devices)
        self._logged = list(self._excess)
        self._free_bytes: Sequence[int] = ()
        # The largest prediction for each device since the last report; and for the report before, what tensors took and
        # what was predicted. A batch that is queued takes memory before it is done, when the next report has it.
        self._predicted = [0] * len(devices)
        self._before: list[tuple[int, int]] = [(0, 0)] * len(devices)

    def bound(self, free_bytes: Sequence[int]) -> Callable[[int], int]:
        """Return a function from a length to the most tokens that a batch of such texts may have.

        The device on which least fits decides. Ranks that encode different texts have parts that are cut between
        sequences, so that where none is padded a part may have almost a sequence more than its share.
        """
        self._free_bytes = free_bytes
        free = [int(each / excess) for each, excess in zip(free_bytes, self._excess, strict=False)]

        def largest_batch_tokens(length: int) -> int:
            part = min(
                need.largest_batch_tokens(each, length)
                for need, each in zip(self.footprints, free, strict=False)
            )
            uneven = 0 if self._pads or self._num_parts == 1 else length
            return max(SMALLEST_TOKENS, part, self._num_parts * (part - uneven))

        return largest_batch_tokens

    def note(self, num_tokens: int, length: int) -> None:
        """Remember a batch that has ended: `num_tokens`, padding included, in texts of at most `length`."""
        num_sequences = -(-num_tokens // (length * self._num_parts))
        self._predicted = [
            max(most, need.predict_batch_bytes(num_sequences, length))
            for need, most in zip(self.footprints, self._predicted, strict=False)
        ]

    def correct(self, memory: MemoryReport) -> None:
        """Compare what tensors took with what was predicted, and correct the predictions."""
        reports = memory.ranks or (memory,)
        for place, (need, report) in enumerate(zip(self.footprints, reports, strict=False)):
            taken, predicted = self._before[place]
            self._before[place] = report.device_bytes - need.weight_bytes, self._predicted[place]
            most, excess = max(predicted, self._predicted[place]), self._excess[place]
            if not predicted or most * excess < LEAST_SHARE * self._free_bytes[place]:
                continue
            self._excess[place] = max(1.0, taken / most, (1 - FADING) * excess)
            if taken > SMALLEST_CHANGE * most * self._logged[place]:
                self._logged[place] = taken / most
                logger.warning(
                    "A batch took %.2f times the memory that was predicted on %s; batches are smaller while they do.",
                    taken / most,
                    self._names[place],
                )
        self._predicted = [0] * len(self._predicted)


def _predict(
    card: ModelCard, report: EncoderReport, devices: Sequence[Device], replica: Replica | None
) -> list[Footprint]:
    precision = report.precision.value if report.precision.value in VALUE_BYTES else "fp32"
    shares = [WHOLE]
    if replica is not None:
        layers = [stage.num_layers for stage in replica.stages]
        shares = list_shares(replica.strategy, layers, len(devices), replica.num_offloaded)
    try:
        return [
            make_footprint(
                card.find_shape(),
                precision,
                report.attention,
                arithmetic=find_arithmetic(precision, device),
                share=share,
                kind=device.kind,
                memory_bytes=device.memory_bytes,
                results=count_results(card),
            )
            for share, device in zip(shares, devices, strict=True)
        ]
    except ModelError as error:
        logger.warning(
            "The memory that batches need is unknown, so their size is found by trial and error: %s", error
        )
        return []
