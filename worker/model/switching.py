"""Turn switches on in a packed network one by one, each compared with the network without it.

Two of them replace modules. GeluProduct computes a linear layer and the GELU behind it at once. ScaledLinear
computes large linear layers in 8-bit floats (float8_e4m3fn), at twice the rate of 16 bits.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.functional import gelu

from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model.cuda_pass import is_device_lost
from worker.model.joined import PRODUCTS, join_products, record_calls
from worker.model.packed import (
    CAN_LIMIT_SPLITS,
    OPAQUE,
    PackedNetwork,
    compute_large,
    find_deviation,
    find_layers,
    first_line,
)

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
        bias = linear.bias  # in the type of the product, see multiply_scaled
        self.bias = None if bias is None else nn.Parameter(bias.detach().bfloat16(), requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        rows = states.flatten(0, -2)  # [tokens, in]
        multiply = multiply_scaled if rows.is_cuda else multiply_restored
        product = multiply(*scale_rows(rows), self.numbers, self.scales, self.bias)
        return product.to(self.dtype).unflatten(0, states.shape[:-1])


def scale_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [n, in] in float8_e4m3fn and scales [n, 1] in fp32; their product approximates rows."""
    wide = rows.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    # A value beyond the largest float8 would become NaN, so values are clamped.
    return (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def multiply_scaled(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply scaled [tokens, in] by a scaled weight [out, in] into [tokens, out] in bf16, and add bf16 [out].

    Needs a GPU that multiplies 8-bit floats. bf16 is what every version of torch returns for scales of rows, and then
    takes as a bias. With fast accumulation sums have some 14 bits (arXiv 2412.19437), and the numbers have 4. Source:
    aten/src/ATen/native/cuda/ScaledBlas.cpp.
    """
    product: Tensor = torch._scaled_mm(
        numbers,
        weight.t(),
        scale_a=scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return product


def multiply_restored(
    numbers: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute what multiply_scaled does in plain torch and fp32 on any device, for comparison."""
    product = numbers.float() @ weight.float().t() * scales * weight_scales.t()
    return product if bias is None else product + bias


def scale_layers(network: PackedNetwork, compute_probes: "ComputeProbes") -> "Undo":
    """Replace large linear layers by ScaledLinear one by one, freeing each weight before the next.

    Those of the same input are joined before, so that each input is scaled once. It cannot be undone, because the
    original weights are not kept. Raises ValueError if no layer is large enough.
    """
    join_products(network.transformer, compute_probes, fewest=2)
    found = [
        (parent, name, child)
        for layer in find_layers(network.transformer)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if is_scalable(child) and not isinstance(parent, GeluProduct)
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


class GeluProduct(nn.Module):
    """A linear layer and the GELU behind it, in its tanh approximation, as a single operation.

    On a GPU it is applied to what the product still has in registers, so that nothing is read and written once more.
    On a processor the same operator would compute the exact GELU. Source: aten/src/ATen/native/cuda/Blas.cpp.
    """

    def __init__(self, product: nn.Module) -> None:
        super().__init__()
        self.product = product

    def forward(self, states: Tensor) -> Tensor:
        if not states.is_cuda:
            return gelu(self.product(states), approximate="tanh")
        return multiply_with_gelu(states, self.product.weight, self.product.bias)


def multiply_with_gelu(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the GELU of the product of states [..., in] and a weight [out, in], plus the bias [out]."""
    rows = states.flatten(0, -2)
    product: Tensor = torch.ops.aten._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return product.unflatten(0, states.shape[:-1])


def fuse_gelus(network: PackedNetwork, compute_probes: "ComputeProbes") -> "Undo":
    """Observe which products with a bias are followed by a GELU, and replace each such pair by a GeluProduct.

    Raises ValueError if there is none.
    """
    calls = record_calls(compute_probes)
    made_by = {
        id(result): module
        for module, _, result in calls
        if type(module) in PRODUCTS and module.bias is not None
    }
    read_by = defaultdict(set)
    for module, states, _ in calls:
        read_by[module].add(made_by.get(id(states)))
    homes = {
        child: (parent, name)
        for parent in network.transformer.modules()
        for name, child in parent.named_children()
    }
    before = []
    for activation, products in read_by.items():
        if None not in products and {activation, *products} <= homes.keys() and is_gelu(activation):
            for old, new in ((activation, nn.Identity()), *((each, GeluProduct(each)) for each in products)):
                before.append((*homes[old], old))
                setattr(*homes[old], new)
    if not before:
        raise ValueError("no product is followed by a GELU")

    def undo() -> None:
        for place in before:
            setattr(*place)

    return undo


def is_gelu(module: nn.Module) -> bool:
    """Return True for a GELU that differs from the tanh approximation no more than the exact one does."""
    values = torch.linspace(-6, 6, 97)
    return next(module.parameters(), None) is None and torch.allclose(
        module(values), gelu(values, approximate="tanh"), rtol=0, atol=6e-4
    )


# The largest number of graphs, one per kind of layer, of which ModernBERT has three, and another one in causal models
# for shared prefixes. Further kinds run uncompiled.
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


def join_attention(network: PackedNetwork, compute_probes: ComputeProbes) -> Undo:
    join_products(network.transformer, compute_probes)
    return None


# FlashAttention besides the one that torch contains, by the names of the switch and of torch.
FLASH_VERSIONS: Final = {"flash3": "FA3", "flash4": "FA4"}


def attend_by(version: str, network: PackedNetwork, _: ComputeProbes) -> Undo:
    """Use another FlashAttention for all flash kernels of the process. Source: torch/nn/attention/_fa3.py, _fa4.py.

    Raises ValueError if this torch cannot keep it from splitting a sequence as the rest of the batch suggests.
    """
    if not CAN_LIMIT_SPLITS:
        raise ValueError(f"torch {torch.__version__} cannot forbid it to split sequences")
    activate_flash_attention_impl(version)
    return lambda: restore_flash_attention_impl()


def compile_graphs(network: PackedNetwork, compute_probes: ComputeProbes) -> Undo:
    def run() -> None:
        compute_large(network)  # first, because Inductor chooses by the sizes that it sees first
        compute_probes()

    before = network.attention
    try:
        compile_layers(network, run)
    except BaseException:
        forget_graphs(network, before)
        raise
    return lambda: forget_graphs(network, before)


# Not chosen, but on for every packed network, and found in no list of switches.
JOINED: Final = SwitchChoice("joined_products", True, "never slower", False)
# The order in which switches are turned on.
STEPS: Final[Mapping[str, Step]] = {
    JOINED.name: Step(join_attention, is_final=True),
    **{name: Step(partial(attend_by, version)) for name, version in FLASH_VERSIONS.items()},
    "fused_gelu": Step(fuse_gelus),
    # A product has a relative error of 4 % in a random direction, and so has a sum of products: a cosine of
    # 0.999. Each further layer adds to the error.
    "fp8": Step(scale_layers, smallest_cosine=0.99, is_final=True),
    "compile": Step(compile_graphs),
}


def apply_switches(
    network: PackedNetwork,
    choices: Sequence[SwitchChoice],
    compute_probes: ComputeProbes,
    steps: Mapping[str, Step] = STEPS,
) -> tuple[SwitchChoice, ...]:
    """Turn the chosen switches on, and off again if they fail or change results. Return the choices.

    Raises ModelError if a switch that was requested by name fails or if the device is lost, and SwitchNotReverted if
    a switch cannot be undone.
    """
    settled = {choice.name: choice for choice in choices}
    wanted = [name for name in steps if name in settled and settled[name].is_on]
    expected = compute_probes() if wanted else []
    smallest_cosine: float | None = None
    for name in wanted:
        # After fp8 a tiny difference may round a value to the neighbouring 8-bit number: later switches keep its bound.
        bound = smallest_cosine or steps[name].smallest_cosine
        found, flaw = _try_step(network, steps[name], compute_probes, expected, bound)
        if flaw is None:
            expected, smallest_cosine = found, bound
        else:
            settled[name] = settled[name].refuse(flaw)
            logger.warning(settled[name].note)
            if steps[name].is_final:
                raise SwitchNotReverted(settled[name])
    return tuple(settled.values())


def _try_step(
    network: PackedNetwork,
    step: Step,
    compute_probes: ComputeProbes,
    expected: list[Tensor],
    smallest_cosine: float | None,
) -> tuple[list[Tensor], str | None]:
    """Turn one switch on. Return the probes computed with it, and what is wrong with it.

    The latter completes a sentence after "because"; it is None if nothing is wrong.
    """
    undo: Undo = None
    try:
        undo = step.turn_on(network, compute_probes)
        found = compute_probes()
        deviation = find_deviation(expected, found, smallest_cosine, network.reference)
        flaw = f"the network deviates with it: {deviation}" if deviation else None
    except Exception as error:  # a kernel, a compiler or a package may raise anything
        if expected[0].is_cuda and is_device_lost():
            raise ModelError(
                f"A switch broke {expected[0].device} for this process ({first_line(error)}); "
                "set VECTORMILL_WORKER_SWITCHES=none, and VECTORMILL_WORKER_ATTENTION=padded if that does not help."
            ) from error
        found, flaw = [], f"it failed: {first_line(error)}"
    if flaw is not None and undo is not None:
        undo()
    return found, flaw
