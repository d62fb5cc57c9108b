"""Turn switches on in a packed network one by one, each compared with the network without it.

Two of them replace modules. Fused projections compute query, key and value of a layer in one product instead
of three. Scaled products compute large linear layers in 8-bit floats (float8_e4m3fn), at twice the rate of 16
bits.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model.cuda_pass import is_device_lost
from worker.model.packed import (
    CAN_LIMIT_SPLITS,
    DIRECT,
    OPAQUE,
    PackedNetwork,
    find_deviation,
    find_layers,
    first_line,
)
from worker.model.weights import RoundedLinear

# Names as in transformers, in the order in which a layer calls the projections.
SIBLINGS: Final = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_lin", "k_lin", "v_lin"),
)
FUSIBLE: Final = (nn.Linear, RoundedLinear)

Projection: TypeAlias = nn.Linear | RoundedLinear


class FusedProjections(nn.Module):
    """One product in place of three projections. It keeps the parts until the layer has taken them."""

    def __init__(self, projections: tuple[Projection, ...]) -> None:
        super().__init__()
        self.sizes = [len(next(projection.parameters())) for projection in projections]
        self.joined = join_projections(projections)
        self._states: Tensor | None = None
        self._parts: dict[int, Tensor] = {}

    def ask(self, states: Tensor, number: int) -> Tensor:
        """Return part `number` of the product with states [..., in]. Part 0 computes all parts.

        Raises RuntimeError if another part is requested with different states.
        """
        if number == 0:
            parts = self.joined(states).split(self.sizes, dim=-1)
            self._states, self._parts = states, dict(enumerate(parts))
        elif self._states is not states:
            raise RuntimeError("query, key and value are computed from different states and cannot be fused")
        part = self._parts.pop(number)
        if not self._parts:
            self._states = None
        return part


class ProjectionPart(nn.Module):
    """The module that replaces one projection of a layer and returns its part of the fused product."""

    def __init__(self, fused: FusedProjections, number: int) -> None:
        super().__init__()
        self.number = number
        if number == 0:
            self.fused = fused  # registered in one part only, so that parameters are found and moved once
        object.__setattr__(self, "_fused", fused)

    _fused: FusedProjections

    def forward(self, states: Tensor) -> Tensor:
        return self._fused.ask(states, self.number)


def fuse_projections(network: PackedNetwork) -> "Undo":
    """Fuse the projections layer by layer, freeing each layer's weights before the next are joined.

    Return what undoes it. Raises ValueError if no layer has separate projections.
    """
    num_fused = 0
    for parent, names in find_siblings(network.transformer):
        fused = FusedProjections(tuple(getattr(parent, name) for name in names))
        for number, name in enumerate(names):
            setattr(parent, name, ProjectionPart(fused, number))
        num_fused += 1
    if not num_fused:
        raise ValueError("no layer has separate projections of query, key and value")
    return lambda: split_projections(network)


def split_projections(network: PackedNetwork) -> None:
    """Undo fuse_projections: put back separate projections, whose weights are views of the joined ones."""
    for module in list(network.transformer.modules()):
        for names in SIBLINGS:
            parts = [getattr(module, name, None) for name in names]
            if all(isinstance(part, ProjectionPart) for part in parts):
                fused = parts[0]._fused  # type: ignore[union-attr]
                start = 0
                for name, size in zip(names, fused.sizes, strict=True):
                    rows = slice(start, start + size)
                    parameters = {key: value[rows] for key, value in fused.joined.named_parameters()}
                    setattr(module, name, _remake(fused.joined, parameters))
                    start += size


def find_siblings(transformer: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str, str]]]:
    """Yield each module that has three projections of one type and input size, with their names."""
    for module in list(transformer.modules()):
        for names in SIBLINGS:
            found = [getattr(module, name, None) for name in names]
            kinds = {type(each) for each in found}
            if len(kinds) == 1 and kinds <= set(FUSIBLE) and len({_describe(each) for each in found}) == 1:
                yield module, names


def _describe(projection: nn.Module | None) -> tuple[object, ...]:
    """Return what joined projections must have in common: everything but the number of outputs."""
    assert projection is not None
    return tuple(
        (name, parameter.shape[1:], parameter.dtype) for name, parameter in projection.named_parameters()
    )


def join_projections(projections: tuple[Projection, ...]) -> Projection:
    """Return one projection that concatenates the outputs of all.

    The given projections lose their weights.
    """
    return _remake(
        projections[0],
        {
            name: torch.cat([take_parameter(projection, name) for projection in projections])
            for name in [name for name, _ in projections[0].named_parameters()]
        },
    )


def take_parameter(projection: nn.Module, name: str) -> Tensor:
    """Remove a parameter from the module and return it, so that it is freed once it is no longer used."""
    parameter: Tensor = getattr(projection, name).detach()
    setattr(projection, name, None)
    return parameter


def _remake(like: Projection, parameters: dict[str, Tensor]) -> Projection:
    """Return a projection of the same kind with these parameters, allocating nothing else."""
    rows = len(next(iter(parameters.values())))
    if isinstance(like, RoundedLinear):
        made: Projection = RoundedLinear(torch.Size((rows, like.num_inputs)), like.dtype, None)
    else:
        made = nn.Linear(like.in_features, rows, bias="bias" in parameters, device="meta")
    for name, value in parameters.items():
        setattr(made, name, nn.Parameter(value, requires_grad=False))
    return made.eval()


LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE: Final = 1e-12  # keeps the scale of a row of zeros above zero
SIZE_STEP: Final = 16
# The smallest sizes of a weight [out, in]: for smaller ones, reading tokens dominates, and computing their
# scales reads them once more.
SMALLEST_SIZE: Final = 1024


class ScaledLinear(nn.Module):
    """nn.Linear with an 8-bit weight, multiplied in 8 bits."""

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
    """Return values [n, in] in float8_e4m3fn and scales [n, 1] in fp32; their product approximates rows."""
    wide = rows.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    # A value beyond the largest float8 would become NaN, so values are clamped.
    return (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def multiply_scaled(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply scaled [tokens, in] by a scaled weight [out, in] into [tokens, out].

    Needs a GPU that multiplies 8-bit floats.
    """
    product: Tensor = torch._scaled_mm(
        numbers, weight.t(), scale_a=scales, scale_b=weight_scales.t(), out_dtype=torch.bfloat16
    )
    return product.to(dtype)


def multiply_restored(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute what multiply_scaled does in plain torch on any device, for comparison."""
    return (numbers.float() @ weight.float().t() * scales * weight_scales.t()).to(dtype)


def scale_layers(network: PackedNetwork) -> "Undo":
    """Replace large linear layers by ScaledLinear one by one, freeing each weight before the next.

    It cannot be undone, because the original weights are not kept. Raises ValueError if no layer is large
    enough.
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
    return None


def is_scalable(module: nn.Module) -> bool:
    """Return True for a plain linear layer whose sizes pay off and are multiples of SIZE_STEP."""
    return (
        type(module) is nn.Linear
        and min(module.weight.shape) >= SMALLEST_SIZE
        and not any(size % SIZE_STEP for size in module.weight.shape)
    )


# The largest number of graphs, one per kind of layer: ModernBERT has three kinds. Further kinds run
# uncompiled.
MOST_GRAPHS: Final = 16
# torch treats a size of 1 as a constant, and would make another graph for a batch of a single token.
FEWEST_TOKENS: Final = 2


def compile_layers(
    network: PackedNetwork, run: Callable[[], object], backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the layers, and run the probes to build their graphs. Nothing is compiled later.

    Layers are compiled rather than the network: equal layers share a graph, so that a model of 32 layers compiles
    as fast as one of two, and the work outside the layers is small. Attention stays a single call in the graph.
    Lengths and counts are symbolic, and once the probes have run nothing is compiled any more: a shape that no
    graph fits, for example a batch of one token, runs uncompiled. So no batch waits for a compiler. `backend` is that
    of torch.compile. Raises whatever the compiler raises. Source: docs.pytorch.org, "Dynamic shapes" and
    torch.compiler.set_stance.
    """
    import torch._dynamo  # imported late, because it loads the compiler
    import torch._inductor.config
    from torch.compiler import set_stance

    transformer = network.transformer
    if next(transformer.parameters()).device.type == "cpu":
        transformer.set_attn_implementation(OPAQUE)
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    # Sizes that happen to be equal in the probes must not be treated as the same symbol.
    torch.fx.experimental._config.use_duck_shape = False
    # Compile in this process: worker processes of the compiler would outlive it.
    torch._inductor.config.compile_threads = 1
    for layer in find_layers(transformer):
        compiled = torch.compile(layer._call_impl, dynamic=True, fullgraph=True, backend=backend)

        def call(
            hidden_states: Tensor,
            *args: Any,
            compiled: Any = compiled,
            plain: Any = layer._call_impl,
            **options: Any,
        ) -> Any:
            chosen = compiled if hidden_states.shape[1] >= FEWEST_TOKENS else plain
            return chosen(hidden_states, *args, **options)

        layer._compiled_call_impl = call  # the attribute that nn.Module.compile sets
    run()
    set_stance("eager_on_recompile")


def forget_graphs(network: PackedNetwork, attention: str) -> None:
    """Undo compile_layers. `attention` is the network's attention from before."""
    import torch._dynamo
    from torch.compiler import set_stance

    set_stance("default")
    for layer in find_layers(network.transformer):
        layer._compiled_call_impl = None
    torch._dynamo.reset()
    network.transformer.set_attn_implementation(attention)


logger = logging.getLogger(__name__)

# Computes the hidden states [tokens, dim] of each probe.
ComputeProbes = Callable[[], list[Tensor]]
# Restores the network as it was before the switch; None if that is impossible.
Undo = Callable[[], object] | None


class SwitchNotReverted(Exception):
    """A switch failed and could not be undone: the network must be loaded again without that switch."""

    def __init__(self, choice: SwitchChoice) -> None:
        super().__init__(choice.note)
        self.choice = choice


@dataclass(frozen=True, slots=True)
class Step:
    """The way to turn one switch on. The network is unchanged if `turn_on` raises.

    `smallest_cosine` is the lowest accepted cosine between a token's hidden states with and without the
    switch; None stands for the one that two kernels in the network's precision reach.
    """

    turn_on: Callable[[PackedNetwork, ComputeProbes], Undo]
    smallest_cosine: float | None = None
    is_final: bool = False  # cannot be undone once it has succeeded


def attend_directly(network: PackedNetwork, _: ComputeProbes) -> Undo:
    before = network.attention
    network.transformer.set_attn_implementation(DIRECT)
    return lambda: network.transformer.set_attn_implementation(before)


def attend_by_flash3(network: PackedNetwork, _: ComputeProbes) -> Undo:
    """Use FlashAttention 3 for all flash kernels of the process. Source: torch/nn/attention/_fa3.py.

    Raises ValueError if this torch cannot keep it from splitting a sequence as the rest of the batch suggests.
    """
    if not CAN_LIMIT_SPLITS:
        raise ValueError(f"torch {torch.__version__} cannot forbid it to split sequences")
    activate_flash_attention_impl("FA3")
    return lambda: restore_flash_attention_impl()


def compile_graphs(network: PackedNetwork, compute_probes: ComputeProbes) -> Undo:
    before = network.attention
    try:
        compile_layers(network, compute_probes)
    except BaseException:
        forget_graphs(network, before)
        raise
    return lambda: forget_graphs(network, before)


# The order in which switches are turned on.
STEPS: Final[Mapping[str, Step]] = {
    "direct_flash": Step(attend_directly),
    "flash3": Step(attend_by_flash3),
    "fused_qkv": Step(lambda network, _: fuse_projections(network)),
    # A product has a relative error of 4 % in a random direction, and so has a sum of products: a cosine of
    # 0.999. Further layers of the model increase it.
    "fp8": Step(lambda network, _: scale_layers(network), smallest_cosine=0.99, is_final=True),
    "compile": Step(compile_graphs),
}


def apply_switches(
    network: PackedNetwork,
    choices: Sequence[SwitchChoice],
    compute_probes: ComputeProbes,
    steps: Mapping[str, Step] = STEPS,
) -> tuple[SwitchChoice, ...]:
    """Turn the chosen switches on, and off again if they fail or change results. Return the choices.

    Raises ModelError if a switch that was requested by name fails or if the device is lost, and NotUndone if
    a switch cannot be undone.
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
                raise SwitchNotReverted(settled[name])
    return tuple(settled.values())


def _try_step(
    network: PackedNetwork, step: Step, compute_probes: ComputeProbes, expected: list[Tensor]
) -> tuple[list[Tensor], str | None]:
    """Turn one switch on. Return the probes computed with it, and what is wrong with it.

    The latter completes a sentence after "because"; it is None if nothing is wrong.
    """
    undo: Undo = None
    try:
        undo = step.turn_on(network, compute_probes)
        found = compute_probes()
        deviation = find_deviation(expected, found, step.smallest_cosine)
        flaw = f"the network deviates with it: {deviation}" if deviation else None
    except Exception as error:  # a kernel, a compiler or a package may raise anything
        if expected[0].is_cuda and is_device_lost():
            raise ModelError(
                f"A switch broke {expected[0].device} for this process ({first_line(error)}); "
                "set VECTORMILL_WORKER_SWITCHES=none."
            ) from error
        found, flaw = [], f"it failed: {first_line(error)}"
    if flaw is not None and undo is not None:
        undo()
    return found, flaw
