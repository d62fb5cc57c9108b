"""Work: a batch, and whose sequences it is made of. Knows no runner."""

from dataclasses import dataclass

from worker.batching.batch import Batch
from worker.batching.sequences import Sequences


@dataclass(frozen=True, slots=True)
class OwnedBatch:
    """A batch, and whose sequences it is made of."""

    sequences: Sequences
    batch: Batch
    is_urgent: bool = False
    is_suspect: bool = False  # it was being encoded, and others beside it, when a runner died or fell sick
    num_failures: int = 0  # of a single sequence, in runners that were sound
    num_sickened: int = 0  # runners that were sound before it and, with nothing else at work, sick behind it

    @property
    def is_tried_alone(self) -> bool:
        return self.is_suspect or self.num_failures > 0

    @property
    def length(self) -> int:
        """Return the length in tokens to which a kernel that pads computes all sequences."""
        return self.sequences.max_length

    def halves(self) -> tuple["OwnedBatch", "OwnedBatch"]:
        middle = len(self.sequences) // 2
        return (
            OwnedBatch(self.sequences.part(0, middle), self.batch.part(0, middle), self.is_urgent),
            OwnedBatch(
                self.sequences.part(middle, len(self.sequences)),
                self.batch.part(middle, len(self.sequences)),
                self.is_urgent,
            ),
        )
