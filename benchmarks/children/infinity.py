"""The peer infinity, used through its Python interface, on its torch or its optimum (ONNX) engine.

It runs in an environment of its own and imports nothing of ours but the protocol. Option: `engine`.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children.serving import ChildOrder, Encoded, serve

OPTIMUM = "optimum"
# The file name that optimum gives to an exported model.
ONNX_FILE = "model.onnx"


class Infinity:
    """An engine of infinity on a separate event loop. Call it with texts."""

    def __init__(self, order: ChildOrder) -> None:
        from infinity_emb import AsyncEmbeddingEngine, EngineArgs

        engine = order.options["engine"]
        # Infinity's optimum engine does not read the model's pooling and would take the first token's vector.
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
        """Make a model count the tokens that it encodes; the cost, one sum per batch, is negligible."""
        encode_core = replica.encode_core

        def counting(features: Any) -> Any:
            mask = features["attention_mask"]
            self._num_tokens += int(mask.sum())
            self._num_computed_tokens += int(np.prod(mask.shape))
            return encode_core(features)

        replica.encode_core = counting


def name_relatively() -> None:
    """Have infinity name the ONNX file relative to the model's directory.

    Infinity finds the file by its absolute path, which optimum takes as relative to that directory.
    """
    from infinity_emb.transformer.embedder import optimum

    optimum.get_onnx_files = lambda **_: Path(ONNX_FILE)


def export_once(order: ChildOrder) -> Path:
    """Export the model to ONNX once and return its directory, where infinity's optimum engine looks for it.

    The export and its optimized form are kept for later runs.
    """
    target = Path(order.cache_dir) / f"{Path(order.model).name}-infinity"
    if not target.is_dir():
        from optimum.onnxruntime import ORTModelForFeatureExtraction
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(order.model)
        part = target.with_suffix(".part")
        ORTModelForFeatureExtraction.from_pretrained(order.model, export=True).save_pretrained(part)
        tokenizer.save_pretrained(part)
        # Infinity cuts texts at max_position_embeddings, whatever the tokenizer's own limit is.
        config = json.loads((part / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = tokenizer.model_max_length
        (part / "config.json").write_text(json.dumps(config), encoding="utf-8")
        part.rename(target)  # Rename when complete: an interrupted run must leave no half of an export.
    return target


if __name__ == "__main__":
    serve(Infinity)
