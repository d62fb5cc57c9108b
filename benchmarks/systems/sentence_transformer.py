"""The peer: `SentenceTransformer.encode` with its defaults, in a process that does nothing else."""

import warnings
from typing import Any

from benchmarks.systems.child import ChildOrder
from benchmarks.systems.serving import Encode, Encoded, read_order, serve


class TokenCount:
    """Counts what goes through the model, as a hook before its first module: a sum per batch, too little to be seen."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_computed_tokens = 0

    def __call__(self, module: object, arguments: tuple[Any, ...], *_: object) -> None:
        mask = arguments[0]["attention_mask"]
        self.num_tokens += int(mask.sum())
        self.num_computed_tokens += mask.numel()


def load(order: ChildOrder) -> Encode:
    from sentence_transformers import SentenceTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SentenceTransformer(order.model, device="cpu", local_files_only=True)

    def encode(texts: list[str]) -> Encoded:
        count = TokenCount()
        handle = model[0].register_forward_pre_hook(count)
        try:
            vectors = model.encode(texts)
        finally:
            handle.remove()
        return Encoded(vectors, count.num_tokens, count.num_computed_tokens)

    return encode


if __name__ == "__main__":
    serve(read_order(), load)
