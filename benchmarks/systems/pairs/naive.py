"""The naive reference: transformers' own model in fp32, every pair padded to the longest that it reads, batches as they
come. So are the published figures of StructBERT made, and what people wrap by hand.

What a pair takes then does not depend on it: `num_timed` of the pairs, spread evenly, are judged, and the seconds of a
pass are those of as many as there are. Options: batch_size, num_timed.
"""

import time
from typing import Any

import numpy as np

from benchmarks.systems.peers.serving import Encoded, read_order, serve
from benchmarks.systems.protocol import ChildOrder


class Naive:
    """Call it with pairs."""

    def __init__(self, order: ChildOrder) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._batch_size = int(order.options["batch_size"])
        self._num_timed = int(order.options["num_timed"])
        self._tokenizer: Any = AutoTokenizer.from_pretrained(order.model)
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(
            order.model, dtype=torch.float32
        ).eval()
        self._max_tokens = self._model.config.max_position_embeddings

    def __call__(self, pairs: list[list[str]]) -> Encoded:
        import torch

        places = choose_timed(len(pairs), self._num_timed)
        timed = [pairs[place] for place in places]
        vectors, num_tokens, num_computed = [], 0, 0
        started = time.perf_counter()
        with torch.inference_mode():
            for start in range(0, len(timed), self._batch_size):
                batch = timed[start : start + self._batch_size]
                inputs = self._tokenizer(
                    [pair[0] for pair in batch],
                    [pair[1] for pair in batch],
                    padding="max_length",
                    truncation=True,
                    max_length=self._max_tokens,
                    return_tensors="pt",
                )
                num_tokens += int(inputs["attention_mask"].sum())
                num_computed += inputs["attention_mask"].numel()
                vectors.append(self._model(**inputs).logits.softmax(-1).numpy())
        seconds = (time.perf_counter() - started) * len(pairs) / len(timed)
        return Encoded(np.concatenate(vectors), num_tokens, num_computed, seconds)

    def report(self) -> dict[str, Any]:
        return {}


def choose_timed(num_pairs: int, num_timed: int) -> list[int]:
    """Places of so many pairs, equally far apart; all where there are no more."""
    count = min(num_pairs, num_timed)
    return [number * num_pairs // count for number in range(count)]


if __name__ == "__main__":
    serve(read_order(), Naive)
