"""Fused projections: query, key and value of a layer by one product instead of three. Knows no architecture by name.

Where a module has three sibling projections, their weights become one [query + key + value, in]. The first that is
asked computes all three and answers its part; the other two answer theirs, and refuse states that the first was not
asked with. Parts are views of one result, so nothing is copied. Weights may be whole, in any type, or rounded to 8
bits: each of their parameters has a row an output, and no group of a scale spans two rows.
"""

from collections.abc import Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from worker.model.packed.network import PackedNetwork
from worker.model.weights.quantization import RoundedLinear

# As transformers names them; the order is that in which a layer asks.
SIBLINGS: Final = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
)
FUSIBLE: Final = (nn.Linear, RoundedLinear)

Projection: TypeAlias = nn.Linear | RoundedLinear


class FusedProjections(nn.Module):
    """The joined product. Holds the parts of one forward pass that have not been asked for yet, and no longer."""

    def __init__(self, projections: tuple[Projection, ...]) -> None:
        super().__init__()
        self.sizes = [len(next(projection.parameters())) for projection in projections]
        self.joined = join_projections(projections)
        self._states: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def ask(self, states: Tensor, number: int) -> Tensor:
        """Return part `number` of the product with states [..., in]."""
        if number == 0:
            parts = self.joined(states).split(self.sizes, dim=-1)
            self._states, self._parts = states, dict(enumerate(parts))
        elif self._states is not states:
            raise RuntimeError("query, key and value were asked with different states, and cannot be fused")
        part = self._parts.pop(number)
        if not self._parts:
            self._states = None
        return part


class ProjectionPart(nn.Module):
    """A module that stands in a layer for one of its projections."""

    def __init__(self, fused: FusedProjections, number: int) -> None:
        super().__init__()
        self.number = number
        if number == 0:
            self.fused = fused  # registered once, so that its parameters are found and moved
        object.__setattr__(self, "_fused", fused)

    _fused: FusedProjections

    def forward(self, states: Tensor) -> Tensor:
        return self._fused.ask(states, self.number)


def fuse_projections(network: PackedNetwork) -> None:
    """Fuse layer by layer, freeing each layer's weights before the next are joined.

    Raises ValueError where the model has nothing to fuse.
    """
    num_fused = 0
    for parent, names in find_siblings(network.transformer):
        fused = FusedProjections(tuple(getattr(parent, name) for name in names))
        for number, name in enumerate(names):
            setattr(parent, name, ProjectionPart(fused, number))
        num_fused += 1
    if not num_fused:
        raise ValueError("no layer has separate projections of query, key and value")


def split_projections(network: PackedNetwork) -> None:
    """Undo fuse_projections: make modules with views of the joined weights."""
    for module in list(network.transformer.modules()):
        for names in SIBLINGS:
            parts = [getattr(module, name, None) for name in names]
            if all(isinstance(part, ProjectionPart) for part in parts):
                fused = parts[0]._fused  # type: ignore[union-attr]
                for name, projection in zip(names, cut_projection(fused.joined, fused.sizes), strict=True):
                    setattr(module, name, projection)


def find_siblings(transformer: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str, str]]]:
    """Yield each module with the names of three projections of one kind that read equally many inputs."""
    for module in list(transformer.modules()):
        for names in SIBLINGS:
            found = [getattr(module, name, None) for name in names]
            kinds = {type(each) for each in found}
            if len(kinds) == 1 and kinds <= set(FUSIBLE) and len({_describe(each) for each in found}) == 1:
                yield module, names


def _describe(projection: nn.Module | None) -> tuple[object, ...]:
    """Return what has to be the same of projections that are joined: all but the number of their outputs."""
    assert projection is not None
    return tuple(
        (name, parameter.shape[1:], parameter.dtype) for name, parameter in projection.named_parameters()
    )


def join_projections(projections: tuple[Projection, ...]) -> Projection:
    """Return one projection with the outputs of all, one behind the other. The joined ones lose their weights."""
    return _remake(
        projections[0],
        {
            name: torch.cat([take_parameter(projection, name) for projection in projections])
            for name in [name for name, _ in projections[0].named_parameters()]
        },
    )


def take_parameter(projection: nn.Module, name: str) -> Tensor:
    """Take a parameter out of the module, so that it is freed when nobody else holds it."""
    parameter: Tensor = getattr(projection, name).detach()
    setattr(projection, name, None)
    return parameter


def cut_projection(joined: Projection, sizes: list[int]) -> Iterator[Projection]:
    start = 0
    for size in sizes:
        yield _remake(
            joined, {name: value[start : start + size] for name, value in joined.named_parameters()}
        )
        start += size


def _remake(like: Projection, parameters: dict[str, Tensor]) -> Projection:
    """Return a projection of the same kind with other parameters, allocating nothing else."""
    rows = len(next(iter(parameters.values())))
    if isinstance(like, RoundedLinear):
        made: Projection = RoundedLinear(torch.Size((rows, like.num_inputs)), like.dtype, None)
    else:
        made = nn.Linear(like.in_features, rows, bias="bias" in parameters, device="meta")
    for name, value in parameters.items():
        setattr(made, name, nn.Parameter(value, requires_grad=False))
    return made.eval()
