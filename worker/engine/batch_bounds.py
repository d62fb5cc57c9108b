"""Bounds of batches before the first one: what they cost, where tuning starts, how many tokens memory holds."""

import logging
import math
from collections.abc import Callable
from typing import Final

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from worker.batching.budget import SMALLEST_TOKENS, BudgetRules
from worker.batching.cost import BatchCost, LengthBuckets, PackedCost, PaddedCost, find_quadratic_length
from worker.devices.device import CPU, Device
from worker.encoder.encoder import EncoderReport
from worker.placement.placement import Replica
from worker.placement.sizes.footprint import VALUE_BYTES, Footprint, make_footprint
from worker.placement.sizes.model_shape import read_model_shape
from worker.placement.strategies import FULLY_SHARDED
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

# Where tuning starts: a GPU needs far more to do at once than a CPU, which keeps the memory of the largest batch it was
# tried with for a while, a batch for each of its streams.
CPU_BATCH_TOKENS: Final = 1024
ACCELERATOR_BATCH_TOKENS: Final = 32768


def make_rules(settings: WorkerSettings, device: Device) -> BudgetRules:
    """Make the rules of the budget. A size that the user gave is not tuned."""
    start_tokens = CPU_BATCH_TOKENS if device.kind == CPU else ACCELERATOR_BATCH_TOKENS
    return BudgetRules(
        settings.max_batch_tokens or start_tokens,
        is_tuned=settings.max_batch_tokens is None,
        high_watermark=settings.memory_high_watermark,
        low_watermark=settings.memory_low_watermark,
    )


def foresee_footprint(card: ModelCard, report: EncoderReport) -> Footprint | None:
    """Return the memory that batches will need; None if the model's files do not tell its sizes. Then only exhaustion
    and watermarks bound its batches.
    """
    precision = report.precision.value if report.precision.value in VALUE_BYTES else "fp32"
    try:
        return make_footprint(read_model_shape(card), precision, report.attention)
    except ModelError as error:
        logger.warning("The size of batches is found by trying: %s", error)
        return None


def bound_batches(footprint: Footprint, free_bytes: int, num_parts: int) -> Callable[[int], int]:
    """Return a function from a length to the most tokens that fit, in `num_parts` parts of a batch."""

    def largest_batch_tokens(length: int) -> int:
        return max(SMALLEST_TOKENS, num_parts * footprint.largest_batch_tokens(free_bytes, length))

    return largest_batch_tokens


def count_batch_parts(replica: Replica | None) -> int:
    """Return the number of parts of a batch, one at a time or one for each device."""
    if replica is None:
        return 1
    return len(replica.devices) if replica.strategy == FULLY_SHARDED else replica.micro_batches


def find_batch_cost(card: ModelCard, report: EncoderReport) -> BatchCost:
    """Return the cost model of this encoder. Attention counts as linear if the model does not tell its sizes."""
    try:
        shape = read_model_shape(card)
    except ModelError as error:
        logger.warning("Long sequences are counted like short ones: %s", error)
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
        return PackedCost(quadratic_length)
    longest = report.longest_bucket
    buckets = None if longest is None else LengthBuckets(longest)
    return PaddedCost(quadratic_length, buckets, holds_squares=holds_squares)
