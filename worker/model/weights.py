"""Read a model's tensors from its files, merge an adapter into them, and hold them rounded to 8 bits in torch modules.

An adapter is merged into the weights of a transformer, so that it costs nothing when texts are encoded.

Only tensors are read from a pickle; none of its code runs. A product with rounded weights first restores them
to the type of the arithmetic. For a batch of thousands of tokens that is little: 8,192 tokens through 7
billion weights are 115 TFLOP of products and about 80 GB of reads and writes for restoring, at the rates of
an H200 190 ms and 16 ms (counted, not measured).
"""

import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import linear

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from vectormill.models.rounding import SMALLEST_TABLE_ROWS, find_group_size, round_linear, round_table
from vectormill.models.tensor_headers import read_header
from vectormill.models.weights import SAFETENSORS, find_weights

# The start and the end along a dimension of a tensor.
Range = tuple[int, int]

# Where transformers' tables of Gemma hold the number by which they multiply.
_FACTOR: Final = "scalar_embed_scale"
_PEFT_PREFIX: Final = "base_model.model."


class PickledWeights:
    """A pickled weight file with the methods of `safe_open`.

    It is memory-mapped: only what is used is read.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ModelError if it holds anything but tensors."""
        options = {"mmap": True} if zipfile.is_zipfile(path) else {}
        try:
            self._tensors: dict[str, Tensor] = torch.load(
                path, map_location="cpu", weights_only=True, **options
            )
        except Exception as error:  # torch raises any error for a pickle that holds more than tensors
            raise ModelError(f"Cannot read the tensors of {path}: {error}") from error

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> Tensor:
        """Return a tensor that can be indexed to read a part of it."""
        return self.get_tensor(name)


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Open a weight file like safetensors' `safe_open`, for reading tensors and slices by name."""
    if path.suffix == SAFETENSORS:
        with safe_open(path, framework="pt") as file:
            yield file
    else:
        yield PickledWeights(path)


def read_tensors(
    paths: Iterable[Path], is_wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Return the tensors of the files by name: all, or those whose name is wanted."""
    found: dict[str, Tensor] = {}
    for path in paths:
        with open_weights(path) as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if is_wanted(name)}  # noqa: SIM118
    return found


def read_ranges(view: Any, dim: int, ranges: list[Range] | None) -> Tensor:
    """Return ranges along `dim` of a tensor in an open file, concatenated; all of it without ranges."""
    before = (slice(None),) * dim
    slices = [slice(None)] if ranges is None else [slice(start, end) for start, end in ranges]
    parts: list[Tensor] = [view[(*before, each)] for each in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


class Rounded(nn.Module):
    """A module that holds its weight rounded, in parameters whose first dimension is that of the weight.

    The parameters are on the meta device until `hold` is called or until they are filled with what `round`
    returns.
    """

    dtype: torch.dtype  # of the products
    numbers: nn.Parameter
    scales: nn.Parameter

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the rounded form of a weight, or of any rows of it, by parameter name."""
        raise NotImplementedError

    def hold(self, weight: Tensor) -> None:
        for name, values in self.round(weight).items():
            setattr(self, name, nn.Parameter(values, requires_grad=False))


class RoundedLinear(Rounded):
    """nn.Linear with an 8-bit weight.

    `shape` is that of the weight [out, in], and `num_inputs` that of the whole weight if this is a part of
    it: a part is rounded as the whole would be. Raises ModelError where that is impossible.
    """

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        bias: nn.Parameter | None,
        num_inputs: int | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.num_outputs, self.num_inputs = shape
        self.group_size = find_group_size(num_inputs or self.num_inputs)
        if self.num_inputs % self.group_size:
            raise ModelError(
                f"A weight with {num_inputs} input features cannot be sharded into slices of {self.num_inputs}: "
                f"with int8 weights a slice must be a multiple of the group size ({self.group_size}); use fewer "
                "devices, or another strategy."
            )
        self.bias = bias
        groups = (self.num_outputs, self.num_inputs // self.group_size)
        self.numbers = _empty((*groups, self.group_size), torch.int8)
        self.scales = _empty((*groups, 1), torch.float32)

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        rounded = round_linear(weight.detach().float().numpy(), self.group_size)
        return {"numbers": torch.from_numpy(rounded.numbers), "scales": torch.from_numpy(rounded.scales)}

    @property
    def weight(self) -> Tensor:
        """Return the restored weight [out, in].

        Scales in bf16 would add as much error as the rounding itself.
        """
        return (self.numbers * self.scales).to(self.dtype).flatten(1)

    def forward(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


class RoundedEmbedding(Rounded):
    """nn.Embedding with an 8-bit table, of which only the rows that are looked up are restored.

    Gemma multiplies what it looks up by `factor`.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, factor: float = 1.0) -> None:
        super().__init__()
        self.dtype = dtype
        self.factor = torch.tensor(factor, dtype=dtype).item()  # rounded as the architecture rounds it
        self.numbers = _empty(tuple(shape), torch.int8)
        self.scales = _empty((shape[0], 1), torch.float32)

    def round(self, weight: Tensor) -> dict[str, Tensor]:
        rounded = round_table(weight.detach().float().numpy())
        numbers, scales = rounded.numbers[:, 0], rounded.scales[:, 0]
        return {"numbers": torch.from_numpy(numbers), "scales": torch.from_numpy(scales)}

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = (self.numbers[input_ids] * self.scales[input_ids]).to(self.dtype)
        return rows if self.factor == 1.0 else rows * self.factor


def apply_quantization(transformer: nn.Module) -> None:
    """Replace linear layers and vocabulary tables one by one, so that no second copy of the model is held."""
    for parent, name, child in find_compressible(transformer):
        rounded = (
            RoundedLinear(child.weight.shape, child.weight.dtype, child.bias)
            if isinstance(child, nn.Linear)
            else RoundedEmbedding(child.weight.shape, child.weight.dtype, find_factor(child))
        )
        rounded.hold(child.weight)
        setattr(parent, name, rounded)
    for parameter in transformer.parameters():
        # Other tensors may be views into the file of all weights, and would keep all of it in memory.
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def find_compressible(transformer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | nn.Embedding]]:
    """Yield each module whose weight is rounded, preceded by its parent and its name there."""
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear or is_compressible_table(child):
                yield parent, name, child


def is_compressible_table(module: nn.Module) -> bool:
    """Return True for a vocabulary table; tables of positions and types are too small to save memory."""
    is_table = type(module) is nn.Embedding or (isinstance(module, nn.Embedding) and hasattr(module, _FACTOR))
    return is_table and module.num_embeddings >= SMALLEST_TABLE_ROWS


def find_factor(table: nn.Module) -> float:
    """Return the number by which a vocabulary table multiplies what is looked up."""
    return float(getattr(table, _FACTOR, 1.0))


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


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
