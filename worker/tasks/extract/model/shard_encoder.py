"""Run one rank's part of a RexUniNLU model that several devices share, in padded batches.

Every rank receives the whole batch, so positions, masks and types need not be sent: pipeline stages pass on
hidden states alone, as for any model. The last stage has the head and returns the cells.
"""

import time
from contextlib import nullcontext
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vectormill.models.families import Layout
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.backends import SHARING
from worker.devices.device import CUDA
from worker.encoder.choice import choose_extraction_precision
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder
from worker.model.cuda_pass import losing_device
from worker.model.torch_encoder import DTYPES
from worker.parallel.shard import LoadedShard
from worker.placement.placement import Rank
from worker.tasks.extract.model.config import read_config
from worker.tasks.extract.model.encoder import ATTENTION, RexEncoder, refuse_unsupported
from worker.tasks.extract.model.head import find_cells, pad_inputs
from worker.tasks.extract.model.network import outline_network

# The layout of any DeBERTa with another name prefix and a head after the layers.
LAYOUT: Final = Layout(
    layers="plm.encoder.layer",
    embeddings="plm.embeddings",
    behind_layers=("ffnq", "ffnk", "rotary_emb"),
    columns=(),
    rows=(),
    after_first_layer="plm.encoder.conv",
)


class RexShardEncoder(DirectEncoder):
    """The encoder of one rank. The constructor returns when all ranks are ready."""

    def __init__(self, order: EncoderOrder, rank: Rank) -> None:
        """Load this rank's part. Raises ModelError for a model or an option that is not supported."""
        start = time.perf_counter()
        refuse_unsupported(order, RexEncoder.obstacle)
        precision = choose_extraction_precision(order.precision, order.device)
        config = read_config(order.card.path)
        self._network = outline_network(order.card.path, config, DTYPES[precision.value]).eval()
        self._shard = LoadedShard(order, rank, self._network, LAYOUT, precision.value, config.hidden_size)
        self._network.prepare(self._shard.device, _gather)
        self.note_loading(
            order,
            start,
            self._shard.num_bytes_read,
            backend=Choice(SHARING.name, f"only {SHARING.name} supports the strategy {rank.strategy}"),
            precision=precision,
            attention=ATTENTION,
            gives_vectors=False,
            num_stages=self._shard.num_stages,
        )

    def encode(self, batch: Batch) -> Ragged:
        # Not inference_mode: the buffers that fully_shard gathers into were made outside of it.
        is_cuda = self._shard.device.type == CUDA
        with losing_device() if is_cuda else nullcontext(), torch.no_grad():
            return self._compute(batch)

    def take_waited_seconds(self) -> float:
        return self._shard.take_waited_seconds()

    def _compute(self, batch: Batch) -> Ragged:
        own, has_cells = self._shard.choose_part(batch, pads=True)
        part = pad_inputs(own, self._shard.device)

        def run(received: Tensor | None) -> Tensor | Ragged:
            made: Tensor = self._network(**part.tokens, is_token=part.is_token, received=received)
            return find_cells(made, part) if has_cells else made

        rows: Ragged = self._shard.run_part(tuple(part.is_token.shape), run)
        return rows if has_cells else Ragged.from_rows([], np.float32)


def _gather(parameter: Tensor) -> Tensor:
    """Return the whole of a parameter that is sliced over the ranks.

    All ranks must call this in the same order.
    """
    if isinstance(parameter, DTensor):
        whole: Tensor = parameter.full_tensor()
        return whole
    return parameter
