"""The peer `SentenceTransformer.encode`: its defaults, or another precision, backend, attention or batch size.

Runs in an environment of its own too: imports sentence-transformers and what that brings, and nothing of ours but the
protocol. Options: backend, precision, attention, batch_size.
"""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

from benchmarks.systems.peers.serving import Encoded, read_order, serve
from benchmarks.systems.protocol import ChildOrder

# torch's own backend reads the model's directory; the others export the model into a form of their own, once.
TORCH = "torch"
# The best that is there: flash attention is a package of its own, sdpa comes with torch.
BEST = "best"
CUDA = "cuda"


class TokenCount:
    """Counts what goes through the model, as a hook before its first module: a sum per batch, too little to be seen."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_computed_tokens = 0

    def __call__(self, module: object, arguments: tuple[Any, ...], *_: object) -> None:
        mask = arguments[0]["attention_mask"]
        self.num_tokens += int(mask.sum())
        self.num_computed_tokens += mask.numel()


class Peer:
    """A model loaded by sentence-transformers. Call it with texts."""

    def __init__(self, order: ChildOrder) -> None:
        from sentence_transformers import SentenceTransformer

        backend = order.options.get("backend", TORCH)
        self._arguments = choose_arguments(order)
        self._batch_size = int(order.options["batch_size"]) if "batch_size" in order.options else None
        exported = find_exported(order, backend)
        is_exported = exported.is_dir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model: Any = SentenceTransformer(
                str(exported) if is_exported else order.model,
                device=order.device.partition(":")[0],
                backend=backend,
                model_kwargs=self._arguments or None,
                local_files_only=True,
            )
        if backend != TORCH and not is_exported:
            part = exported.with_suffix(".part")
            self._model.save_pretrained(str(part))
            part.rename(exported)  # whole or not at all: a run may be interrupted

    def __call__(self, texts: list[str]) -> Encoded:
        count = TokenCount()
        handle = self._model[0].register_forward_pre_hook(count)
        batch_size = {"batch_size": self._batch_size} if self._batch_size else {}
        try:
            vectors = self._model.encode(texts, **batch_size)
        finally:
            handle.remove()
        return Encoded(vectors, count.num_tokens, count.num_computed_tokens)

    def report(self) -> dict[str, Any]:
        return {name: str(value) for name, value in self._arguments.items()}


def choose_arguments(order: ChildOrder) -> dict[str, Any]:
    """What the model is loaded with besides the library's defaults."""
    arguments: dict[str, Any] = {}
    if order.options.get("precision") == "bf16":
        from torch import bfloat16

        arguments["dtype"] = bfloat16
    if order.options.get("attention") == BEST:
        has_flash = order.device.startswith(CUDA) and importlib.util.find_spec("flash_attn") is not None
        arguments["attn_implementation"] = "flash_attention_2" if has_flash else "sdpa"
    return arguments


def find_exported(order: ChildOrder, backend: str) -> Path:
    """Where the model as the backend exported it is kept; `torch` keeps nothing there."""
    return Path(order.cache_dir) / f"{Path(order.model).name}-{backend}"


if __name__ == "__main__":
    serve(read_order(), Peer)
