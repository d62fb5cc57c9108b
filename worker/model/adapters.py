"""Merge an adapter into the weights of a transformer, so that it costs nothing when texts are encoded."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.tensor_headers import read_header
from vectormill.models.weights import find_weights
from worker.model.weights import Range, open_weights, read_ranges

_PEFT_PREFIX: Final = "base_model.model."


@dataclass(frozen=True, slots=True)
class MatrixPair:
    """The two matrices, still in an adapter's files, whose product is added to a weight [rows, columns].

    Of a linear layer `rows` is B [rows, rank] and `columns` is A [rank, columns]. A table of embeddings is
    transposed: `rows` is A [rank, rows] and `columns` is B [columns, rank].
    """

    rows: Any
    columns: Any
    is_table: bool
    scaling: float

    def add_to(self, values: Tensor, dim: int, ranges: list[Range]) -> Tensor:
        """Return `values`, which are ranges of the weight along `dim`, plus their part of the product."""
        rows = read_ranges(self.rows, int(self.is_table), ranges if dim == 0 else None).float()
        columns = read_ranges(self.columns, int(not self.is_table), ranges if dim == 1 else None).float()
        product = (columns @ rows).T if self.is_table else rows @ columns
        return (values.float() + product * self.scaling).to(values.dtype)


@contextmanager
def open_adapter(transformer: nn.Module, card: ModelCard) -> Iterator[dict[str, MatrixPair]]:
    """Open the card's adapter, and yield its matrices by the name of the weight that they change; none without one.

    The transformer is the whole one, but its parameters may be on the meta device. Raises ModelError if the
    adapter belongs to another model.
    """
    if card.adapter is None:
        yield {}
        return
    folder = card.path / card.adapter.folder
    found: dict[str, dict[str, tuple[Any, tuple[int, ...]]]] = defaultdict(dict)
    with ExitStack() as files:
        for path in find_weights(folder, f"{card.name}/{card.adapter.folder}"):
            file = files.enter_context(open_weights(path))
            for key, header in read_header(path).items():
                place, _, kind = key.removeprefix(_PEFT_PREFIX).removesuffix(".weight").partition(".lora_")
                found[place][kind.removeprefix("embedding_")] = file.get_slice(key), header.shape
        modules = dict(transformer.named_modules())
        own_prefix = f"{getattr(transformer, 'base_model_prefix', '')}."
        pairs: dict[str, MatrixPair] = {}
        for place, matrices in found.items():
            own = place if place in modules else place.removeprefix(own_prefix)
            is_table = isinstance(modules.get(own), nn.Embedding)
            names = ("A", "B") if is_table else ("B", "A")
            (rows, first), (columns, second) = (matrices.get(name, (None, ())) for name in names)
            if is_table:
                first, second = first[::-1], second[::-1]
            weight = getattr(modules.get(own), "weight", None)
            if weight is None or (*first[:1], *second[1:]) != weight.shape or first[1:] != second[:1]:
                raise ModelError(
                    f"The adapter {card.adapter.folder!r} of model {card.name!r} does not fit its weights at {place!r}."
                )
            pairs[f"{own}.weight"] = MatrixPair(rows, columns, is_table, card.adapter.scaling)
        yield pairs


@torch.no_grad()
def merge_adapter(transformer: nn.Module, card: ModelCard) -> None:
    """Add the products of the card's adapter, if it has one, as `merge_and_unload` of peft.

    Raises ModelError if the adapter belongs to another model.
    """
    with open_adapter(transformer, card) as pairs:
        for name, pair in pairs.items():
            weight = transformer.get_parameter(name)
            weight.copy_(pair.add_to(weight, 0, [(0, weight.shape[0])]))
