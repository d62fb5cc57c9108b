"""Compile the layers of a packed network by torch.compile, at load and never again.

A layer is compiled and not the network: alike layers share a graph, so that a model of 32 compiles as fast as one of
two, and what lies around them is little. Attention stays one call in the graph. Lengths and counts are symbols, and
once the probes have run nothing is compiled any more: what no graph fits, a batch of one token say, is computed as
without the switch. So no batch's time has a compiler's in it. Source: docs.pytorch.org, "Dynamic shapes" and
torch.compiler.set_stance.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch._dynamo
import torch._inductor.config
from torch.compiler import set_stance

from worker.model.packed import OPAQUE, PackedNetwork
from worker.model.switching import find_layers

# The most kinds of layers: ModernBERT has three kinds. More are computed without.
MOST_GRAPHS: Final = 16
# torch assumes that what is 1 stays 1, and would make another graph for a batch of a single token.
FEWEST_TOKENS: Final = 2


def compile_layers(
    network: PackedNetwork, run: Callable[[], object], backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Compile the layers, and make their graphs by running the probes. `backend` is that of torch.compile.

    Raises whatever a compiler raises.
    """
    transformer = network.transformer
    if next(transformer.parameters()).device.type == "cpu":
        transformer.set_attn_implementation(OPAQUE)
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    # Numbers that happen to be equal in the probes are not taken for the same.
    torch.fx.experimental._config.use_duck_shape = False
    # In this process: helpers would outlive it.
    torch._inductor.config.compile_threads = 1
    for layer in find_layers(transformer):
        layer._compiled_call_impl = _choose_by_size(  # what nn.Module.compile sets
            torch.compile(layer._call_impl, dynamic=True, fullgraph=True, backend=backend), layer._call_impl
        )
    run()
    set_stance("eager_on_recompile")


def forget_graphs(network: PackedNetwork, attention: str) -> None:
    """Undo compile_layers. `attention` is the one that the network had before."""
    set_stance("default")
    for layer in find_layers(network.transformer):
        layer._compiled_call_impl = None
    torch._dynamo.reset()
    network.transformer.set_attn_implementation(attention)


def count_graphs() -> int:
    """Return how many this process has made since it began, or since the counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _choose_by_size(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        chosen = compiled if hidden_states.shape[1] >= FEWEST_TOKENS else plain
        return chosen(hidden_states, *args, **options)

    return call
