"""Fill a transformer without weights with this rank's parts of them, read from the model's files.

Parameters stay on torch's meta device until a strategy has divided them; buffers (tables of positions and
rotary frequencies) are real, since no file holds them. A rank reads the bytes of its own part only, so that k
ranks together read the model once.

Parts of compressed weights are rounded as the whole weights would be. A cut by rows, as for columns of tensor
parallelism and for full sharding, keeps every group of values that share a scale; a cut by inputs does so
only if it does not go through a group.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

from vectormill.domain.errors import ModelError
from vectormill.models.families import Layout
from vectormill.models.model_card import ModelCard
from vectormill.models.tensor_headers import TensorHeader, read_header
from vectormill.models.weights import find_weights
from worker.encoder.encoder import OnRead
from worker.model.heads import PUBLISHED_PREFIX, is_published, load_config, outline_head
from worker.model.network import prepare_transformer
from worker.model.runtime import transformers
from worker.model.weights import (
    MatrixPair,
    Range,
    Rounded,
    RoundedEmbedding,
    RoundedLinear,
    find_compressible,
    find_factor,
    open_adapter,
    open_weights,
    read_ranges,
)


class WeightFiles:
    """The open weight files of a model. Use as a context manager.

    Tensors are named as in transformers' bare transformer; some files add a `prefix` to these names.
    """

    def __init__(self, card: ModelCard, prefix: str) -> None:
        self._card = card
        self._prefix = prefix
        self._open = ExitStack()
        self._places: dict[
            str, tuple[Any, str, TensorHeader]
        ] = {}  # the file, the stored name and the tensor's header
        self.num_bytes = 0

    def __enter__(self) -> Self:
        for path in find_weights(self._card.path, self._card.name):
            file = self._open.enter_context(open_weights(path))
            self._places |= {stored: (file, stored, header) for stored, header in read_header(path).items()}
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, name: str, dim: int, ranges: list[Range], dtype: torch.dtype) -> Tensor:
        """Return ranges of the tensor along `dim`, concatenated.

        Raises ModelError if the tensor is missing.
        """
        file, stored, _ = self._find(name)
        tensor = read_ranges(file.get_slice(stored), dim, ranges)
        self.num_bytes += tensor.nbytes
        return tensor.to(dtype)

    def count_bytes(self, name: str, num_values: int) -> int:
        """Return the number of bytes that `num_values` values of the tensor take in its file."""
        return num_values * self._find(name)[2].value_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if it is missing."""
        return self._find(name)[2].shape

    def _find(self, name: str) -> tuple[Any, str, TensorHeader]:
        for known in (name, f"{self._prefix}.{name}"):
            if known in self._places:
                return self._places[known]
        raise ModelError(
            f"The weights in {self._card.path} are incomplete for the model {self._card.name!r}: {name} is missing."
        )


class SummedLinear(RoundedLinear):
    """A linear layer cut by inputs: the products of all ranks are summed, and the bias is added once."""

    def forward(self, states: Tensor) -> Tensor:
        output = linear(states, self.weight)
        dist.all_reduce(output)
        return output if self.bias is None else output + self.bias


def hold_rounded(skeleton: nn.Module) -> dict[str, Tensor]:
    """Replace the modules that a single device would compress by empty compressed ones.

    Call it before full sharding, which then cuts the compressed parameters, but after tensor parallelism,
    whose cuts it keeps. Return the cut parameters by name. Raises ModelError if a cut goes through a group.
    """
    paths = {module: path for path, module in skeleton.named_modules()}
    cuts: dict[str, Tensor] = {}
    for parent, name, child in find_compressible(skeleton):
        weight, bias = child.weight, getattr(child, "bias", None)
        for leaf, parameter in (("weight", weight), ("bias", bias)):
            if isinstance(parameter, DTensor):
                cuts[f"{paths[child]}.{leaf}"] = parameter
        own = _own_part(weight)
        if isinstance(child, nn.Embedding):
            setattr(parent, name, RoundedEmbedding(own.shape, weight.dtype, find_factor(child)))
            continue
        own_bias = None if bias is None else nn.Parameter(_own_part(bias), requires_grad=False)
        is_summed = isinstance(weight, DTensor) and weight.placements[0] == Shard(1)
        kind = SummedLinear if is_summed else RoundedLinear
        setattr(parent, name, kind(own.shape, weight.dtype, own_bias, weight.shape[1]))
    return cuts


def _own_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def build_skeleton(card: ModelCard, dtype: torch.dtype) -> nn.Module:
    """Return the bare transformer in evaluation mode with parameters on the meta device.

    Raises ModelError.
    """
    try:
        config = load_config(card)
        with _parameters_on_meta():
            model: nn.Module = transformers.AutoModel.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"Cannot build the model {card.name!r} from {card.path}: {error}") from error
    return prepare_transformer(model).eval().requires_grad_(False)


def list_shapes(card: ModelCard) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all of the model's weights by name, without reading files. Raises ModelError."""
    with transformers.initialization.no_init_weights():  # drawing them takes seconds, even without storage
        skeleton = build_skeleton(card, torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    if card.classifier is not None and not card.classifier.num_words:
        head, names = outline_head(card)
        shapes |= {names[own]: tuple(parameter.shape) for own, parameter in head.named_parameters()}
    return shapes


def load_word_head(card: ModelCard, dtype: torch.dtype) -> nn.Module:
    """Return the model's masked language model, whose transformer stays on the meta device: only its head is read.

    Raises ModelError.
    """
    with transformers.initialization.no_init_weights(), _parameters_on_meta():
        model: nn.Module = transformers.AutoModelForMaskedLM.from_config(load_config(card), dtype=dtype)
    own = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not name.startswith(f"{model.base_model_prefix}.")
    ]
    # The matrix of the words is that of the embeddings, unless the configuration says otherwise.
    read: dict[str, nn.Parameter] = {}
    with open_adapter(model, card) as adapter, WeightFiles(card, "") as files:
        for name in own:
            stored = model.all_tied_weights_keys.get(name, name)
            if stored not in read:
                ranges = [(0, files.shape(stored)[0])]
                values = files.read(stored, 0, ranges, dtype)
                if stored in adapter:
                    values = adapter[stored].add_to(values, 0, ranges)
                read[stored] = nn.Parameter(values, requires_grad=False)
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, read[stored])
    return model


def fill(
    model: nn.Module,
    card: ModelCard,
    layout: Layout,
    device: torch.device,
    *,
    first_layer: int = 0,
    joined: Mapping[str, int] = MappingProxyType({}),
    cuts: Mapping[str, Tensor] = MappingProxyType({}),
    adapter: Mapping[str, MatrixPair] = MappingProxyType({}),
    on_read: OnRead | None = None,
) -> int:
    """Allocate parameters without storage on the device, and fill all from the files. Return the bytes read.

    `first_layer` is the index in the whole model of this part's first layer. `joined` are those of the
    layout, where each of the matrices in one tensor is cut separately. `cuts` are, by name, the parameters as
    they were cut, for modules that do not record which part they hold. `adapter` are the matrices that change
    weights of the whole model, of which each part is added to the same part of its weight.
    """
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    model._apply(lambda held: torch.empty_like(held, device=device) if held.device.type == "meta" else held)
    for module, name, buffer in buffers:
        setattr(module, name, buffer.to(device))
    in_layer = re.compile(rf"^({re.escape(layout.layers)}\.)(\d+)\.")
    prefix = PUBLISHED_PREFIX if is_published(card) else str(getattr(model, "base_model_prefix", ""))
    rounded = {path: module for path, module in model.named_modules() if isinstance(module, Rounded)}
    held = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in rounded or name.endswith(".bias")
    } | {f"{path}.weight": module.numbers for path, module in rounded.items()}
    with WeightFiles(card, prefix) as files, torch.no_grad():
        parts: dict[str, tuple[str, int, list[Range]]] = {}  # name -> stored name, dimension and ranges
        num_bytes = 0
        for name, parameter in held.items():
            # A stage's parameter is named by its layer; in the whole model the earlier layers are counted too.
            stored = in_layer.sub(lambda match: f"{match[1]}{int(match[2]) + first_layer}.", name)
            shape = files.shape(stored)
            num_joined = next((count for path, count in joined.items() if f".{path}." in name), 1)
            dim, ranges = _own_ranges(cuts.get(name, parameter), shape, num_joined)
            parts[name] = stored, dim, ranges
            num_slices = sum(end - start for start, end in ranges)
            num_bytes += files.count_bytes(stored, prod(shape) // shape[dim] * num_slices)
        for name, (stored, dim, ranges) in parts.items():
            module = rounded.get(name.removesuffix(".weight"))
            values = files.read(stored, dim, ranges, held[name].dtype if module is None else module.dtype)
            if stored in adapter:
                values = adapter[stored].add_to(values, dim, ranges)
            if module is None:
                _copy(values, held[name], stored, card)
            else:
                for leaf, numbers in module.round(values).items():
                    _copy(numbers, getattr(module, leaf), stored, card)
            if on_read is not None:
                on_read(files.num_bytes, num_bytes)
        return files.num_bytes


def _copy(values: Tensor, parameter: Tensor, name: str, card: ModelCard) -> None:
    """Copy values into a parameter. Raises ModelError if they do not fit."""
    local = _own_part(parameter)
    if values.shape != local.shape:
        raise ModelError(f"The shape of tensor {name!r} in {card.path} does not match the configuration.")
    local.copy_(values)


def _own_ranges(parameter: Tensor, shape: tuple[int, ...], num_joined: int) -> tuple[int, list[Range]]:
    """Return the dimension, and the ranges along it, of this rank's part of a stored tensor."""
    placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
    if not isinstance(placement, Shard):
        return 0, [(0, shape[0])]
    mesh = parameter.device_mesh
    part = shape[placement.dim] // num_joined
    step = -(-part // mesh.size())  # like torch.chunk: the last ranks may have less, or nothing
    start, end = (min(part, step * (mesh.get_local_rank() + ahead)) for ahead in (0, 1))
    return placement.dim, [(part * number + start, part * number + end) for number in range(num_joined)]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter created in the block to the meta device at once, freeing its storage."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
