"""Compute vectors from a table of static embeddings with NumPy, on a core of the processor. Loads no framework.

A text's rows are added up one after another in fp32, each text alone, so its vector is the same to the bit in
any batch.
"""

import json
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.errors import ModelError
from vectormill.models.static_table import MODEL2VEC_TENSOR, MODULE_TENSOR, NUMPY_TYPES, WEIGHTS_FILE
from vectormill.models.tensor_headers import read_header, read_header_bytes
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import CPU
from worker.encoder.choice import NUMPY, choose_static_precision
from worker.encoder.encoder import AUTO, Choice, DirectEncoder, EncoderOrder

# The rows that are gathered at once: a megabyte of 256 numbers each, which stays in the cache of a core.
BLOCK_TOKENS: Final = 1024


class StaticEncoder(DirectEncoder):
    """An encoder that adds up rows of a table, which is memory-mapped in the type in which it is stored."""

    def __init__(self, order: EncoderOrder) -> None:
        """Map the table. Raises ModelError for an option that is not supported."""
        start = time.perf_counter()
        assert order.card.static is not None
        if order.backend not in (AUTO, NUMPY):
            raise ModelError(f"Static embeddings need no backend such as {order.backend}; use auto.")
        if order.device.kind != CPU:
            raise ModelError(
                f"Static embeddings are added up by the processor, not by {order.device.name}; use cpu."
            )
        precision = choose_static_precision(order.precision)
        tensors = map_tensors(order.card.path / order.card.static.folder / WEIGHTS_FILE)
        self._dimension = order.card.dimension
        self._table = tensors[MODEL2VEC_TENSOR if order.card.static.is_model2vec else MODULE_TENSOR]
        # In a table of fewer rows than tokens: the row of each token, and its weight.
        self._mapping, self._weights = tensors.get("mapping"), tensors.get("weights")
        self.note_loading(
            order,
            start,
            sum(each.nbytes for each in tensors.values()),
            backend=Choice(NUMPY, "static embeddings are added up without a framework"),
            precision=precision,
            attention="none",
            num_threads=1,
            is_packed=True,
        )

    def encode(self, batch: Batch) -> Ragged:
        vectors = np.zeros((len(batch), self._dimension), dtype=np.float32)
        bounds = np.concatenate(([0], np.cumsum(batch.lengths))).tolist()
        for text, vector in enumerate(vectors):
            ids = batch.input_ids[bounds[text] : bounds[text + 1]]
            for start in range(0, len(ids), BLOCK_TOKENS):
                vector += np.add.reduce(self._read(ids[start : start + BLOCK_TOKENS]), axis=0)
            vector /= max(1, len(ids))
        return Ragged.from_matrix(vectors)

    def _read(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the rows [len(ids), dim] of these tokens. Raises IndexError for an unknown id."""
        rows = self._table[ids if self._mapping is None else self._mapping[ids]].astype(
            np.float32, copy=False
        )
        return rows if self._weights is None else rows * self._weights[ids, np.newaxis].astype(np.float32)


def map_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors of a safetensors file, mapped into memory: pages are read when they are needed."""
    offsets, start = read_header_bytes(path)
    places = json.loads(offsets)
    return {
        name: np.memmap(
            path, NUMPY_TYPES[tensor.dtype], "r", start + places[name]["data_offsets"][0], tensor.shape
        ).view(np.ndarray)
        for name, tensor in read_header(path).items()
    }
