"""The peer vLLM, used as a library: `LLM.embed` on all texts at once, in bf16 and without CUDA graphs.

It runs in an environment of its own and imports nothing of ours but the protocol. CUDA graphs cover
generation token by token, which an embedder never does, and recording them takes a minute.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children.serving import ChildOrder, Encoded, serve


class Vllm:
    """A model loaded by vLLM. Call it with texts."""

    def __init__(self, order: ChildOrder) -> None:
        from vllm import LLM

        self._model: Any = LLM(
            model=order.model,
            runner="pooling",
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=False,  # passes read the same texts again
            download_dir=str(Path(order.cache_dir)),
        )

    def __call__(self, texts: list[str]) -> Encoded:
        outputs = self._model.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": -1})
        vectors = np.array([output.outputs.embedding for output in outputs], dtype=np.float32)
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return Encoded(vectors, num_tokens, num_tokens)  # it pads nothing

    def report(self) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__}


if __name__ == "__main__":
    serve(Vllm)
