"""The peer infinity, through its Python interface and with its defaults, on its torch or its optimum (ONNX) engine.

Runs in an environment of its own: imports infinity_emb and what that brings, and nothing of ours but the protocol.
Option: engine.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children.serving import ChildOrder, Encoded, serve

OPTIMUM = "optimum"
# As optimum names what it exports.
ONNX_FILE = "model.onnx"


class Infinity:
    """An engine of infinity on an event loop of its own. Call it with texts."""

    def __init__(self, order: ChildOrder) -> None:
        from infinity_emb import AsyncEmbeddingEngine, EngineArgs

        engine = order.options["engine"]
        # Its optimum engine does not read the model's pooling and would take the first token's vector.
        arguments = {"pooling_method": "mean"} if engine == OPTIMUM else {}
        model = Path(order.model)
        if engine == OPTIMUM:
            model = export_once(order)
            name_relatively()
        self._loop = asyncio.new_event_loop()
        self._engine: Any = AsyncEmbeddingEngine.from_args(
            EngineArgs(
                model_name_or_path=str(model),
                engine=engine,
                device=order.device.partition(":")[0],
                **arguments,
            )
        )
        self._num_tokens = self._num_computed_tokens = 0
        for replica in self._engine._model_replicas:
            self._count_tokens(replica)
        self._loop.run_until_complete(self._engine.astart())

    def __call__(self, texts: list[str]) -> Encoded:
        self._num_tokens = self._num_computed_tokens = 0
        vectors, _ = self._loop.run_until_complete(self._engine.embed(sentences=texts))
        return Encoded(np.asarray(vectors, dtype=np.float32), self._num_tokens, self._num_computed_tokens)

    def report(self) -> dict[str, Any]:
        return {}

    def _count_tokens(self, replica: Any) -> None:
        """Has a model count what goes through it: a sum per batch, too little to be seen."""
        encode_core = replica.encode_core

        def counting(features: Any) -> Any:
            mask = features["attention_mask"]
            self._num_tokens += int(mask.sum())
            self._num_computed_tokens += int(np.prod(mask.shape))
            return encode_core(features)

        replica.encode_core = counting


def name_relatively() -> None:
    """In a directory it finds the file by its whole path, which its optimum takes relative to that directory."""
    from infinity_emb.transformer.embedder import optimum

    optimum.get_onnx_files = lambda **_: Path(ONNX_FILE)


def export_once(order: ChildOrder) -> Path:
    """The model as ONNX, which this engine wants to find in its directory; kept, with its optimized form."""
    target = Path(order.cache_dir) / f"{Path(order.model).name}-infinity"
    if not target.is_dir():
        from optimum.onnxruntime import ORTModelForFeatureExtraction
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(order.model)
        part = target.with_suffix(".part")
        ORTModelForFeatureExtraction.from_pretrained(order.model, export=True).save_pretrained(part)
        tokenizer.save_pretrained(part)
        # It cuts texts at the number of positions, whatever the tokenizer's own limit is.
        config = json.loads((part / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = tokenizer.model_max_length
        (part / "config.json").write_text(json.dumps(config), encoding="utf-8")
        part.rename(target)  # whole or not at all: a run may be interrupted
    return target


if __name__ == "__main__":
    serve(Infinity)
