"""Compiled layers: the vectors are those without, in few graphs for all batches, and a compiler's error is no end."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.compiler import set_stance
from torch.nn.functional import cosine_similarity

from tests.compiled import IGNORES_TORCHS_WARNING, NEEDS_COMPILER, count_graphs, fresh_compiler
from tests.contract.packed_models import MODELS, make_transformer
from vectormill.domain.errors import ModelError
from worker.batching.batch import Batch
from worker.encoder.choice import read_attention_shape
from worker.encoder.switches import SwitchChoice
from worker.model import switching
from worker.model.packed import (
    EXACT,
    FLASH,
    OPAQUE,
    PackedNetwork,
    compute_probes,
    exact_kernel,
    pack_batch,
    packed_states,
)
from worker.model.switching import (
    JOINED,
    MOST_GRAPHS,
    Step,
    Undo,
    apply_switches,
    compile_layers,
    forget_graphs,
)

pytestmark = [IGNORES_TORCHS_WARNING]

CPU = torch.device("cpu")
TRACED = "eager"  # torch's own backend that makes graphs and compiles nothing


@pytest.fixture(scope="module")
def compiled_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: a kernel that this process has is not written again."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def own_compiler(compiled_dir: Path) -> Iterator[None]:
    with fresh_compiler(compiled_dir):
        yield


# Large enough for products in 8 bits.
LARGE = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 1}
# Of layers, where they differ in more than their weights.
NUM_KINDS = {
    "modernbert": 3,
    "gemma3_text": 2,
    "gemma3_text, both ways": 2,
    "qwen3, window": 2,
    "qwen3, window, both ways": 2,
}


class Compiled:
    """A tiny model, packed, and how it is tried."""

    def __init__(self, name: str, **more: Any) -> None:
        self.name = name
        transformer = make_transformer(name, **more)
        network: Any = SimpleNamespace(transformer=transformer, dense=nn.Sequential(), modes=("mean",))
        self.shape = read_attention_shape(transformer.config)
        self.packed = PackedNetwork(network, EXACT, shares_prefixes=self.shape.is_causal)

    def probe(self) -> list[Tensor]:
        states: list[Tensor] = compute_probes(self.packed, self.shape, 64, CPU)
        return states

    @property
    def num_graphs(self) -> int:
        """One for each kind of layer, and in causal models another one for batches that share prefixes."""
        return NUM_KINDS.get(self.name, 1) * (1 + self.shape.is_causal)

    def encode(self, lengths: list[int]) -> Tensor:
        """Return the states of sequences of these lengths; an even number of them share the longest possible prefix."""
        tokens = np.random.default_rng(sum(lengths))
        ids = [tokens.integers(2, 300, length).astype(np.int32) for length in lengths]
        is_shared = self.shape.is_causal and len(lengths) % 2 == 0
        if is_shared:
            ids = [max(ids, key=len)[:length] for length in lengths]
        batch = pack_batch(Batch.from_ids(ids), self.shape, shares_prefixes=self.shape.is_causal)
        assert bool(batch.prefixes) == is_shared
        with torch.inference_mode():
            return packed_states(self.packed, batch, CPU)


def smallest_cosine(a: list[Tensor], b: list[Tensor]) -> float:
    return float(cosine_similarity(torch.cat(a), torch.cat(b), dim=-1).min())


def make_lengths(num_batches: int) -> list[list[int]]:
    """Of 1 to 12 sequences of 1 to 64 tokens, and those that look like something special."""
    generator = np.random.default_rng(0)
    batches = [generator.integers(1, 65, generator.integers(1, 13)).tolist() for _ in range(num_batches)]
    return [*batches, [1], [1, 1], [2], [64], [32], [5, 5, 5, 5, 5], [32, 32], [4, 4, 4]]


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_few_graphs_whatever_its_batches(name: str) -> None:
    model = Compiled(name)
    batches = make_lengths(10)
    expected = [model.encode(lengths) for lengths in batches]
    compile_layers(model.packed, model.probe, TRACED)
    num_graphs = count_graphs()
    assert 1 <= num_graphs <= model.num_graphs, "layers that are alike share a graph"
    set_stance("default")  # which would make another graph wherever it is wanted
    found = [model.encode(lengths) for lengths in batches]
    assert count_graphs() == num_graphs
    assert smallest_cosine(found, expected) >= 0.99999


def test_a_model_of_many_layers_is_no_more_graphs_than_one_of_few() -> None:
    model = Compiled("bert", num_hidden_layers=MOST_GRAPHS + 4)
    compile_layers(model.packed, model.probe, TRACED)
    assert count_graphs() == 1


def test_behind_the_probe_nothing_is_compiled_any_more() -> None:
    model = Compiled("bert")
    compile_layers(model.packed, lambda: model.encode([7, 9]), TRACED)
    before = count_graphs()
    states = torch.randn(1, 5, 32, dtype=torch.float64)
    with pytest.raises(
        RuntimeError
    ):  # of the product, and not of a compiler: the layer's weights are float32
        model.packed.transformer.encoder.layer[0](states, cu_seq_lens_q=torch.tensor([0, 5]), max_length_q=5)
    assert count_graphs() == before


def switch(model: Compiled, step: Step, *, is_asked: bool = False) -> SwitchChoice:
    choices = [SwitchChoice("compile", True, "measured", is_asked)]
    (choice,) = apply_switches(model.packed, choices, model.probe, {"compile": step})
    return choice


def compile_with(backend: Any) -> Step:
    def turn_on(network: PackedNetwork, run: Any) -> Undo:
        before = network.attention
        compile_layers(network, run, backend)
        return lambda: forget_graphs(network, before)

    return Step(turn_on)


def fuse_wrongly(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler that loses the residual connections: every second sum is its second part."""
    for number, node in enumerate(graph.graph.nodes):
        if node.op == "call_function" and "add" in str(node.target) and number % 2:
            node.replace_all_uses_with(node.args[0])
    graph.recompile()
    return graph.forward


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_a_compiler_that_fuses_wrongly_is_caught_and_the_network_goes_on_without(name: str) -> None:
    model = Compiled(name)
    expected = model.probe()
    choice = switch(model, compile_with(fuse_wrongly))
    assert not choice.is_on
    assert choice.reason.startswith("the network deviates with it")
    assert model.packed.attention == EXACT
    assert all(torch.equal(one, other) for one, other in zip(model.probe(), expected, strict=True))


@torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
def test_a_compiler_that_is_missing_switches_it_off_with_its_reason() -> None:
    """torch's own, with a name of a C++ compiler that is not there."""
    model = Compiled("bert")
    expected = model.probe()
    (choice,) = apply_switches(model.packed, [SwitchChoice("compile", True, "measured", False)], model.probe)
    assert not choice.is_on
    assert choice.reason.startswith("it failed: ")
    assert "No working C++ compiler" in choice.reason
    assert model.packed.attention == EXACT
    assert all(torch.equal(one, other) for one, other in zip(model.probe(), expected, strict=True))
    with pytest.raises(
        ModelError, match=r"The switch compile cannot be used because it failed: .* C\+\+ compiler"
    ):
        apply_switches(model.packed, [SwitchChoice("compile", True, "requested", True)], model.probe)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("name", "sizes", "names", "smallest"),
    [
        ("bert", {}, ("compile",), 0.99999),
        ("bert", {}, (JOINED.name, "compile"), 0.99999),
        ("bert", {}, ("fused_gelu", "compile"), 0.9999),
        ("bert", LARGE, (JOINED.name, "fp8", "compile"), 0.99),
        ("qwen3", LARGE, (JOINED.name, "fp8", "compile"), 0.99),
    ],
)
def test_a_compiled_model_gives_the_vectors_of_one_that_is_not(
    name: str, sizes: dict[str, int], names: tuple[str, ...], smallest: float, compiled_dir: Path
) -> None:
    model = Compiled(name, **sizes)
    if sizes:
        for parameter in model.packed.transformer.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
    batches = make_lengths(6)
    expected = [model.encode(lengths) for lengths in batches]
    choices = [SwitchChoice(name, True, "requested", True) for name in names]
    assert all(choice.is_on for choice in apply_switches(model.packed, choices, model.probe))
    assert model.packed.attention == OPAQUE
    num_graphs = count_graphs()
    assert num_graphs == model.num_graphs
    found = [model.encode(lengths) for lengths in batches]
    assert smallest_cosine(found, expected) >= smallest
    assert count_graphs() == num_graphs
    assert any(compiled_dir.rglob("*.so")), "what is compiled lies where it was told to"


@NEEDS_COMPILER
def test_a_residual_and_its_norm_are_one_kernel() -> None:
    """The names of the kernels that Inductor writes say which operations each of them fuses."""
    model = Compiled("bert")
    code: list[str] = []
    with torch._inductor.config.patch({"fx_graph_cache": False}):
        _, code = run_and_get_code(lambda: compile_layers(model.packed, model.probe))
    kernels = {name for text in code for name in re.findall(r"cpp_fused\w+", text)}
    norms = {name for name in kernels if "native_layer_norm" in name}
    assert norms
    assert all("add" in name for name in norms), kernels


@pytest.mark.parametrize("name", ["bert", "qwen3, window", "modernbert"])
def test_the_flash_operator_is_one_node_of_a_graph_for_all_lengths(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the kernel underneath the operator, which is the exact one here."""
    calls: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", compute_exactly, "CPU")
        monkeypatch.setattr(switching, "OPAQUE", FLASH)
        model = Compiled(name)
        batches = make_lengths(6)
        expected = [model.encode(lengths) for lengths in batches]
        compile_layers(model.packed, model.probe, record)
        flash = [sum("_flash_attention_forward" in call for call in graph) for graph in calls]
        assert flash == [1] * model.num_graphs
        set_stance("default")
        assert smallest_cosine([model.encode(lengths) for lengths in batches], expected) >= 0.99999
        assert len(calls) == model.num_graphs


def compute_exactly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    _: Tensor,
    longest: int,
    *more: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    window = (options["window_size_left"], options["window_size_right"])
    output = exact_kernel(query, key, value, bounds, longest, options["scale"], window)
    return (output.contiguous(), *(torch.zeros(1) for _ in range(4)))
