"""Turn switches on in a packed network, one after another, each compared with the network without it.

Two of them replace modules. Fused projections: query, key and value of a layer by one product instead of three.
Scaled products: large linear layers in numbers of 8 bits (float8_e4m3fn), twice as many a second as of 16.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model.cuda_pass import is_device_lost
from worker.model.packed import DIRECT, PackedNetwork, find_deviation, first_line
from worker.model.weights import RoundedLinear


def find_layers(transformer: nn.Module) -> list[nn.Module]:
    """Return the list that holds most of the model's weights; of lists in lists the outer one.

    Raises ValueError where there is none.
    """
    lists = [module for module in transformer.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError("its layers are in no list")
    return list(max(lists, key=_count_weights))


def _count_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# As transformers names them; the order is that in which a layer asks.
SIBLINGS: Final = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
)
FUSIBLE: Final = (nn.Linear, RoundedLinear)

Projection: TypeAlias = nn.Linear | RoundedLinear


class FusedProjections(nn.Module):
    """One product in place of three projections, which holds the parts of a forward pass until each is asked for."""

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


LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE: Final = 1e-12  # a row of zeros has any scale but zero
SIZE_STEP: Final = 16
# The least sizes of a weight [out, in]: less is bound by reading tokens, which finding their scales does once more.
SMALLEST_SIZE: Final = 1024


class ScaledLinear(nn.Module):
    """nn.Linear with a weight of 8 bits, and a product in 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        numbers, scales = scale_rows(linear.weight.detach())
        self.dtype = linear.weight.dtype
        self.numbers = nn.Parameter(numbers, requires_grad=False)  # [out, in]
        self.scales = nn.Parameter(scales, requires_grad=False)  # [out, 1]
        self.bias = linear.bias

    def forward(self, states: Tensor) -> Tensor:
        rows = states.flatten(0, -2)  # [tokens, in]
        multiply = multiply_scaled if rows.is_cuda else multiply_restored
        product = multiply(*scale_rows(rows), self.numbers, self.scales, self.dtype)
        if self.bias is not None:
            product = product + self.bias
        return product.unflatten(0, states.shape[:-1])


def scale_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [n, in] in float8_e4m3fn and scales [n, 1] in fp32, whose product is nearly the rows [n, in]."""
    wide = rows.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    # A value beyond the largest number becomes NaN and not the largest.
    return (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def multiply_scaled(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return [tokens, in] times [out, in], on a GPU that computes it -> [tokens, out]."""
    product: Tensor = torch._scaled_mm(
        numbers, weight.t(), scale_a=scales, scale_b=weight_scales.t(), out_dtype=torch.bfloat16
    )
    return product.to(dtype)


def multiply_restored(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply the same numbers in plain torch on any device, for comparison."""
    return (numbers.float() @ weight.float().t() * scales * weight_scales.t()).to(dtype)


def scale_layers(network: PackedNetwork) -> None:
    """Replace large linear layers one after another, freeing each weight before the next.

    It cannot be undone: what a weight was before is not kept. Raises ValueError where no layer is large enough.
    """
    found = [
        (parent, name, child)
        for layer in find_layers(network.transformer)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if is_scalable(child)
    ]
    if not found:
        raise ValueError(f"no layer has a weight of {SMALLEST_SIZE} by {SMALLEST_SIZE} or more")
    while found:
        parent, name, child = found.pop()
        setattr(parent, name, ScaledLinear(child))
        del child


def is_scalable(module: nn.Module) -> bool:
    """Return True if it is a plain linear layer of a size that pays, and that the product takes."""
    return (
        type(module) is nn.Linear
        and min(module.weight.shape) >= SMALLEST_SIZE
        and not any(size % SIZE_STEP for size in module.weight.shape)
    )


logger = logging.getLogger(__name__)

# For each probe the hidden states of its tokens [tokens, dim].
ComputeProbes = Callable[[], list[Tensor]]
# Makes the network as it was before; None where that is lost.
Undo = Callable[[], object] | None


class NotUndone(Exception):
    """A switch failed behind which the network is not what it was: it has to be loaded again, without the switch."""

    def __init__(self, choice: SwitchChoice) -> None:
        super().__init__(choice.note)
        self.choice = choice


@dataclass(frozen=True, slots=True)
class Step:
    """How one switch is turned on. The network is unchanged if `turn_on` raises.

    `smallest_cosine` is that of a token's hidden state with and without it; None stands for that of two kernels in the
    arithmetic of the network.
    """

    turn_on: Callable[[PackedNetwork, ComputeProbes], Undo]
    smallest_cosine: float | None = None
    is_final: bool = False  # cannot be undone


def attend_directly(network: PackedNetwork, _: ComputeProbes) -> Undo:
    before = network.attention
    network.transformer.set_attn_implementation(DIRECT)
    return lambda: network.transformer.set_attn_implementation(before)


def attend_by_flash3(network: PackedNetwork, _: ComputeProbes) -> Undo:
    """Use FlashAttention 3 for all flash kernels of the process. Source: torch/nn/attention/_fa3.py."""
    activate_flash_attention_impl("FA3")
    return lambda: restore_flash_attention_impl()


def fuse(network: PackedNetwork, _: ComputeProbes) -> Undo:
    fuse_projections(network)
    return lambda: split_projections(network)


def compile_graphs(network: PackedNetwork, compute_probes: ComputeProbes) -> Undo:
    from worker.model.compilation import (  # only now: it brings the compiler
        compile_layers,
        forget_graphs,
    )

    before = network.attention
    try:
        compile_layers(network, compute_probes)
    except BaseException:
        forget_graphs(network, before)
        raise
    return lambda: forget_graphs(network, before)


def multiply_in_8_bits(network: PackedNetwork, _: ComputeProbes) -> Undo:
    scale_layers(network)
    return None


# In the order in which they are turned on.
STEPS: Final[Mapping[str, Step]] = {
    "direct_flash": Step(attend_directly),
    "flash3": Step(attend_by_flash3),
    "fused_qkv": Step(fuse),
    # A product errs by 4 % of its length, in any direction, and so does a sum of them: 0.999. Models make more of it.
    "fp8": Step(multiply_in_8_bits, smallest_cosine=0.99, is_final=True),
    "compile": Step(compile_graphs),
}


def apply_switches(
    network: PackedNetwork,
    choices: Sequence[SwitchChoice],
    compute_probes: ComputeProbes,
    steps: Mapping[str, Step] = STEPS,
) -> tuple[SwitchChoice, ...]:
    """Return the choices, with those off that fail or differ, which leave the network as it was.

    Raises ModelError for one of them that was asked for by name, and when the device is lost; NotUndone.
    """
    settled = {choice.name: choice for choice in choices}
    wanted = [name for name in steps if name in settled and settled[name].is_on]
    expected = compute_probes() if wanted else []
    for name in wanted:
        found, flaw = _try_step(network, steps[name], compute_probes, expected)
        if flaw is None:
            expected = found
        else:
            settled[name] = settled[name].refuse(flaw)
            logger.warning(settled[name].note)
            if steps[name].is_final:
                raise NotUndone(settled[name])
    return tuple(settled.values())


def _try_step(
    network: PackedNetwork, step: Step, compute_probes: ComputeProbes, expected: list[Tensor]
) -> tuple[list[Tensor], str | None]:
    """Return the probes with the switch, and what is wrong with it, to stand behind "because"."""
    undo: Undo = None
    try:
        undo = step.turn_on(network, compute_probes)
        found = compute_probes()
        deviation = find_deviation(expected, found, step.smallest_cosine)
        flaw = f"with it the network deviates: {deviation}" if deviation else None
    except Exception as error:  # of a kernel, a compiler or a package, which raise anything
        if expected[0].is_cuda and is_device_lost():
            raise ModelError(
                f"A switch broke {expected[0].device} for this process ({first_line(error)}); "
                "say VECTORMILL_WORKER_SWITCHES=none."
            ) from error
        found, flaw = [], f"it failed: {first_line(error)}"
    if flaw is not None and undo is not None:
        undo()
    return found, flaw
