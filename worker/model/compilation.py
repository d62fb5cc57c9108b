"""Compile the layers of a packed network with torch.compile, when it is loaded and never again.

Layers are compiled rather than the network: equal layers share a graph, so that a model of 32 layers compiles
as fast as one of two, and the work outside the layers is small. Attention stays a single call in the graph.
Lengths and counts are symbolic, and once the probes have run nothing is compiled any more: a shape that no
graph fits, for example a batch of one token, runs uncompiled. So no batch waits for a compiler. Source:
docs.pytorch.org, "Dynamic shapes" and torch.compiler.set_stance.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch._dynamo
import torch._inductor.config
from torch.compiler import set_stance

from worker.model.packed import OPAQUE, PackedNetwork, find_layers

# The largest number of graphs, one per kind of layer: ModernBERT has three kinds. Further kinds run
# uncompiled.
MOST_GRAPHS: Final = 16
# torch treats a size of 1 as a constant, and would make another graph for a batch of a single token.
FEWEST_TOKENS: Final = 2


def compile_layers(
    network: PackedNetwork, run: Callable[[], object], backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the layers, and run the probes to build their graphs. `backend` is that of torch.compile.

    Raises whatever the compiler raises.
    """
    transformer = network.transformer
    if next(transformer.parameters()).device.type == "cpu":
        transformer.set_attn_implementation(OPAQUE)
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    # Sizes that happen to be equal in the probes must not be treated as the same symbol.
    torch.fx.experimental._config.use_duck_shape = False
    # Compile in this process: worker processes of the compiler would outlive it.
    torch._inductor.config.compile_threads = 1
    for layer in find_layers(transformer):
        layer._compiled_call_impl = _choose_by_size(  # the attribute that nn.Module.compile sets
            torch.compile(layer._call_impl, dynamic=True, fullgraph=True, backend=backend), layer._call_impl
        )
    run()
    set_stance("eager_on_recompile")


def forget_graphs(network: PackedNetwork, attention: str) -> None:
    """Undo compile_layers. `attention` is the network's attention from before."""
    set_stance("default")
    for layer in find_layers(network.transformer):
        layer._compiled_call_impl = None
    torch._dynamo.reset()
    network.transformer.set_attn_implementation(attention)


def _choose_by_size(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        chosen = compiled if hidden_states.shape[1] >= FEWEST_TOKENS else plain
        return chosen(hidden_states, *args, **options)

    return call
