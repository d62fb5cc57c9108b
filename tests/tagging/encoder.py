"""TagEncoder: any …ForTokenClassification of transformers with torch, the logits of every token as a row a text."""

import time

import numpy as np
import torch
from transformers import AutoModelForTokenClassification

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.choice import FP32
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport, device_choice
from worker.encoder.padding import pad_batch


class TagEncoder(DirectEncoder):
    """Padded batches, whose padding is left out of the rows."""

    def __init__(self, order: EncoderOrder) -> None:
        start = time.perf_counter()
        torch.set_num_threads(order.num_threads)
        self._model = AutoModelForTokenClassification.from_pretrained(order.card.path, local_files_only=True)
        self._model.eval()
        self._report = EncoderReport(
            device=device_choice(order),
            backend=Choice("torch", "the only one that this model was shown"),
            precision=Choice(FP32, "the only one that this model was shown"),
            attention="padded",
            num_threads=order.num_threads,
            load_seconds=time.perf_counter() - start,
            gives_vectors=False,
        )

    def encode(self, batch: Batch) -> Ragged:
        padded = pad_batch(batch, pad_token_id=0)
        mask = torch.from_numpy(padded.attention_mask)
        with torch.inference_mode():
            logits = self._model(torch.from_numpy(padded.input_ids), attention_mask=mask).logits
        # [n, length, labels] -> [tokens, labels], without padding.
        rows = logits[mask.bool()].float().numpy()
        return Ragged.from_lengths(np.ascontiguousarray(rows).reshape(-1), batch.lengths * rows.shape[1])

    def describe(self) -> EncoderReport:
        return self._report


def load_tagger(order: EncoderOrder) -> TagEncoder:
    return TagEncoder(order)
