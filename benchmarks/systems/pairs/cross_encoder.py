"""The peer `CrossEncoder.predict` of sentence-transformers, which sorts pairs by their lengths and pads in a batch.

Runs in an environment of its own too: imports sentence-transformers and what that brings, and nothing of ours but the
protocol. Options: backend, precision, batch_size.
"""

import warnings
from typing import Any

from benchmarks.systems.peers.sentence_transformer import TORCH, TokenCount, find_exported
from benchmarks.systems.peers.serving import Encoded, read_order, serve
from benchmarks.systems.protocol import ChildOrder


class Peer:
    """Call it with pairs."""

    def __init__(self, order: ChildOrder) -> None:
        from sentence_transformers import CrossEncoder
        from torch import bfloat16, float32

        backend = order.options.get("backend", TORCH)
        self._batch_size = int(order.options["batch_size"])
        exported = find_exported(order, backend)
        is_exported = exported.is_dir()
        # The weights lie in 16 bits, which is what transformers would compute in.
        precision = bfloat16 if order.options.get("precision") == "bf16" else float32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model: Any = CrossEncoder(
                str(exported) if is_exported else order.model,
                device=order.device.partition(":")[0],
                backend=backend,
                model_kwargs={"dtype": precision} if backend == TORCH else None,
                local_files_only=True,
            )
        if backend != TORCH and not is_exported:
            part = exported.with_suffix(".part")
            self._model.save_pretrained(str(part))
            part.rename(exported)  # whole or not at all: a run may be interrupted

    def __call__(self, pairs: list[list[str]]) -> Encoded:
        count = TokenCount()
        handle = self._model[0].register_forward_pre_hook(count)
        try:
            scores = self._model.predict(
                [tuple(pair) for pair in pairs],
                batch_size=self._batch_size,
                apply_softmax=True,
                show_progress_bar=False,
            )
        finally:
            handle.remove()
        return Encoded(scores, count.num_tokens, count.num_computed_tokens)

    def report(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(read_order(), Peer)
