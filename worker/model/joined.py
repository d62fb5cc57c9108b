"""Compute products that read the same input, such as query, key and value of a layer, as a single one.

Which products do is observed while the network computes, so that no architecture has to be known. In place of the
first product JoinedProducts computes all, and in place of each other one LaterProduct returns its part.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from worker.model.weights import RoundedLinear

Product: TypeAlias = nn.Linear | RoundedLinear
PRODUCTS: Final = (nn.Linear, RoundedLinear)
# Query, key and value. A gated MLP has two products of the same input, whose joined result would be held until both
# parts are used: then four instead of three tensors of the intermediate size are needed at once.
NUM_OF_ATTENTION: Final = 3
# A module that was called with a single tensor, and references to this tensor and to the result.
Call: TypeAlias = tuple[nn.Module, weakref.ref[Tensor], weakref.ref[Tensor]]


class JoinedProducts(nn.Module):
    """One product in place of several, in their order. It returns the first part and keeps the others."""

    def __init__(self, products: list[Product]) -> None:
        super().__init__()
        self.sizes = [len(next(product.parameters())) for product in products]
        self.joined = join_weights(products)
        self._states: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def forward(self, states: Tensor) -> Tensor:
        self._parts = dict(enumerate(self.joined(states).split(self.sizes, dim=-1)))
        self._states = states
        return self._parts.pop(0)

    def take(self, number: int, states: Tensor) -> Tensor:
        """Return a part once. Raises RuntimeError if there is none that was computed from these states."""
        part = self._parts.pop(number, None)
        if part is None or self._states is not states:
            raise RuntimeError("joined products are computed from different states, or one of them twice")
        if not self._parts:
            self._states = None
        return part


class LaterProduct(nn.Module):
    """Returns the part of a product that is computed together with an earlier one."""

    def __init__(self, products: JoinedProducts, number: int) -> None:
        super().__init__()
        self._number = number
        # A child is registered once, in the place of the first product, so that its weights are found and moved once.
        object.__setattr__(self, "_products", products)

    _products: JoinedProducts

    def forward(self, states: Tensor) -> Tensor:
        return self._products.take(self._number, states)


def join_products(transformer: nn.Module, run: Callable[[], object], fewest: int = NUM_OF_ATTENTION) -> None:
    """Join products of the same input, if there are at least `fewest`. `run` computes any batch.

    They are joined one after another, each group's weights freed before the next group's are joined.
    """
    for parent, names in list(find_joinable(transformer, record_calls(run))):
        if len(names) >= fewest:
            joined = JoinedProducts([getattr(parent, name) for name in names])
            setattr(parent, names[0], joined)
            for number, name in enumerate(names[1:], start=1):
                setattr(parent, name, LaterProduct(joined, number))


def record_calls(run: Callable[[], object]) -> list[Call]:
    """Return the calls of modules during `run`. References are weak, so that no tensor lives longer for them."""
    calls: list[Call] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            calls.append((module, weakref.ref(inputs[0]), weakref.ref(output)))

    hook = register_module_forward_hook(note)
    try:
        run()
    finally:
        hook.remove()
    return calls


def find_joinable(transformer: nn.Module, calls: list[Call]) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Yield modules with the names of products that are always computed one after another from the same input.

    The products are of one type, and have or lack the same parameters.
    """
    homes = {
        child: (parent, name)
        for parent in transformer.modules()
        for name, child in parent.named_children()
        if type(child) in PRODUCTS
    }
    calls_by_parent = defaultdict(list)
    for module, states, _ in calls:
        if module in homes:
            parent, name = homes[module]
            calls_by_parent[parent].append((name, states))
    for parent, own in calls_by_parent.items():
        # Weak references to one tensor are the same object, also after the tensor is gone and its memory used again.
        runs = [tuple(name for name, _ in same) for _, same in groupby(own, lambda call: id(call[1]))]
        for names in dict.fromkeys(runs):
            is_steady = all(each == names or not {*each} & {*names} for each in runs)
            kinds = {_describe(getattr(parent, name)) for name in names}
            if is_steady and len({*names}) == len(names) > 1 and len(kinds) == 1:
                yield parent, names


def _describe(product: nn.Module) -> tuple[object, ...]:
    """Return what joined products must have in common: everything but the number of outputs."""
    parameters = product.named_parameters()
    return (type(product), *((name, each.shape[1:], each.dtype) for name, each in parameters))


def join_weights(products: list[Product]) -> Product:
    """Return one product that concatenates the outputs of all. The given ones lose their weights."""
    like = products[0]
    names = [name for name, _ in like.named_parameters()]
    joined = {name: torch.cat([take_parameter(product, name) for product in products]) for name in names}
    rows = len(joined[names[0]])
    made: Product
    if isinstance(like, RoundedLinear):
        made = RoundedLinear(torch.Size((rows, like.num_inputs)), like.dtype, None)
    else:
        made = nn.Linear(like.in_features, rows, bias="bias" in joined, device="meta")
    for name, value in joined.items():
        setattr(made, name, nn.Parameter(value, requires_grad=False))
    return made.eval()


def take_parameter(module: nn.Module, name: str) -> Tensor:
    """Remove a parameter from the module and return it, so that it is freed once it is no longer used."""
    parameter: Tensor = getattr(module, name).detach()
    setattr(module, name, None)
    return parameter
