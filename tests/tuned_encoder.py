"""An encoder that is slow or fast, wrong or ill by the way in which its model is run, as a file in its folder says."""

import json
import os
import time

import numpy as np

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport

BEHAVIOURS = "behaviours.json"  # in the cache directory: by backend, `seconds` a batch, and perhaps a `fault`
WRONG, CRASHES, RAISES, DIES_IN_SERVICE = "wrong", "crashes", "raises", "dies in service"


class TunedEncoder(DirectEncoder):
    """Computes vectors from token ids alone, in the time that its way takes."""

    def __init__(self, order: EncoderOrder) -> None:
        behaviours = json.loads((order.cache_dir / BEHAVIOURS).read_text())
        self._backend = next(iter(behaviours)) if order.way is None else order.way.backend
        self._seconds = behaviours[self._backend]["seconds"]
        self._fault = behaviours[self._backend].get("fault", "")
        self._dimension = order.card.dimension
        if self._fault == CRASHES or (self._fault == DIES_IN_SERVICE and order.way and order.way.reason):
            os._exit(7)
        if self._fault == RAISES:
            raise RuntimeError("no kernel for this card")

    def encode(self, batch: Batch) -> Ragged:
        time.sleep(self._seconds)  # the simulated device takes this time for a batch
        vectors = np.empty((len(batch), self._dimension), dtype=np.float32)
        for row, ids in enumerate(np.split(batch.input_ids, np.cumsum(batch.lengths)[:-1])):
            vectors[row] = np.resize(ids[::-1] if self._fault == WRONG else ids, self._dimension)
        return Ragged.from_matrix(vectors)

    def describe(self) -> EncoderReport:
        choice = Choice(self._backend, "for tests")
        return EncoderReport(choice, choice, choice, "none", 1, 0.0)
