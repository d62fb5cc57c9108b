"""The peers `SentenceTransformer.encode` and, with the option `task=pairs`, `CrossEncoder.predict`.

They run with their defaults, or with the precision, backend, attention or batch size that the options of
these names give. They run in an environment of their own and import nothing of ours but `serving`.
"""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

from benchmarks.children.serving import ChildOrder, Encoded, serve

# torch reads the model's directory as it is; the other backends first export the model to a format of their
# own, once.
TORCH = "torch"


class TokenCount:
    """A hook before the model's first module that counts tokens. One sum per batch costs next to nothing."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_computed_tokens = 0

    def __call__(self, module: object, arguments: tuple[Any, ...], *_: object) -> None:
        mask = arguments[0]["attention_mask"]
        self.num_tokens += int(mask.sum())
        self.num_computed_tokens += mask.numel()


class Peer:
    """A model loaded by sentence-transformers. Call it with texts, or with pairs."""

    def __init__(self, order: ChildOrder) -> None:
        import sentence_transformers

        backend = order.options.get("backend", TORCH)
        self._is_of_pairs = order.options.get("task") == "pairs"
        self._options: dict[str, Any] = {}
        if "batch_size" in order.options:
            self._options["batch_size"] = int(order.options["batch_size"])
        self._arguments = choose_arguments(order, backend)
        exported = Path(order.cache_dir) / f"{Path(order.model).name}-{backend}"
        is_exported = exported.is_dir()
        name = "CrossEncoder" if self._is_of_pairs else "SentenceTransformer"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model: Any = getattr(sentence_transformers, name)(
                str(exported) if is_exported else order.model,
                device=order.device.partition(":")[0],
                backend=backend,
                model_kwargs=self._arguments or None,
                local_files_only=True,
            )
        if backend != TORCH and not is_exported:
            part = exported.with_suffix(".part")
            self._model.save_pretrained(str(part))
            part.rename(exported)  # Rename when complete: an interrupted run must leave no half of an export.

    def __call__(self, texts: list[Any]) -> Encoded:
        count = TokenCount()
        handle = self._model[0].register_forward_pre_hook(count)
        try:
            if self._is_of_pairs:
                options = {"apply_softmax": True, "show_progress_bar": False}
                vectors = self._model.predict([tuple(pair) for pair in texts], **options, **self._options)
            else:
                vectors = self._model.encode(texts, **self._options)
        finally:
            handle.remove()
        return Encoded(vectors, count.num_tokens, count.num_computed_tokens)

    def report(self) -> dict[str, Any]:
        return {}


def choose_arguments(order: ChildOrder, backend: str) -> dict[str, Any]:
    """Return the arguments, besides the library's defaults, with which the model is loaded."""
    arguments: dict[str, Any] = {}
    if backend == TORCH and "precision" in order.options:
        import torch

        arguments["dtype"] = torch.bfloat16 if order.options["precision"] == "bf16" else torch.float32
    if order.options.get("attention") == "best":
        # Flash attention is a separate package; sdpa comes with torch.
        has_flash = order.device.startswith("cuda") and importlib.util.find_spec("flash_attn") is not None
        arguments["attn_implementation"] = "flash_attention_2" if has_flash else "sdpa"
    return arguments


if __name__ == "__main__":
    serve(Peer)
