"""Predict the memory that batches take on each device of a replica, and correct that by what they really take."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from worker.batching.budget import SMALLEST_TOKENS
from worker.devices.device import Device
from worker.encoder.choice import find_arithmetic
from worker.encoder.encoder import EncoderReport
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

logger = logging.getLogger(__name__)

# A batch tells how well its memory was predicted if it was to take this share of what is free. In a smaller one, what
# kernels take whatever its size weighs more.
LEAST_SHARE: Final = 1 / 4
# A correction loses this share with each report of batches that took less: half of it in three minutes.
FADING: Final = 0.001
# A factor by which what was logged has to be exceeded, so that not every other batch is logged.
SMALLEST_CHANGE: Final = 1.02


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

    def hear(self, memory: MemoryReport) -> None:
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
