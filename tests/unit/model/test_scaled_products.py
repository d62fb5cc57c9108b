"""Products in 8 bits: how far they are from exact ones, what becomes of extreme rows, and what is never held twice."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from vectormill.domain.errors import ModelError
from worker.encoder.switches import SwitchChoice
from worker.model import switching as scaled_products
from worker.model.switching import (
    SMALLEST_SIZE,
    NotUndone,
    ScaledLinear,
    apply_switches,
    fuse_projections,
    is_scalable,
    multiply_restored,
    multiply_scaled,
    scale_layers,
    scale_rows,
)

pytestmark = pytest.mark.usefixtures("without_gradients")

RANDOM = torch.Generator().manual_seed(0)
SIZE = SMALLEST_SIZE


def random_rows(num_rows: int, num_inputs: int = SIZE) -> Tensor:
    """Some of them a hundred times larger than others."""
    scales = 10 ** (2 * torch.rand(num_rows, 1, generator=RANDOM))
    return torch.randn(num_rows, num_inputs, generator=RANDOM) * scales


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Block(nn.Module):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.small = nn.Linear(size, 64)


def network_of(*blocks: nn.Module) -> Any:
    transformer = nn.Module()
    transformer.layers = nn.ModuleList(blocks)
    return SimpleNamespace(transformer=transformer)


def test_no_number_is_off_by_more_than_a_sixteenth_of_it() -> None:
    rows = random_rows(50)
    numbers, scales = scale_rows(rows)
    assert (numbers.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (50, 1))
    restored = numbers.float() * scales
    is_normal = rows.abs() >= scales * 2**-6  # what is smaller has fewer digits, and less to say
    assert is_normal.float().mean() > 0.99
    assert float(((restored - rows).abs() / rows.abs())[is_normal].max()) <= 1 / 16 + 1e-6
    assert float((restored - rows).abs()[~is_normal].max() / scales.max()) <= 2**-10 + 1e-6


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, 65504.0])
def test_rows_of_nothing_and_of_very_much_stay_numbers(value: float) -> None:
    rows = torch.full((3, 32), value)
    numbers, scales = scale_rows(rows)
    restored = numbers.float() * scales
    assert restored.isfinite().all()
    if value > 1e-6:
        torch.testing.assert_close(restored, rows, rtol=1e-5, atol=0)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_whole_weight_to_a_cosine_of_999_in_1000(
    has_bias: bool, dtype: torch.dtype
) -> None:
    linear = nn.Linear(SIZE, SIZE, bias=has_bias).to(dtype).eval()
    states = random_rows(40).to(dtype).view(2, 20, SIZE)
    expected = linear(states)
    found = ScaledLinear(linear)(states)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert float(cosine_similarity(found.float(), expected.float(), dim=-1).min()) >= 0.999


def test_the_operator_gives_what_the_restored_numbers_give() -> None:
    """torch's own, which has an implementation for processors: the same arguments as on a GPU, in the same layout."""
    states, weight = scale_rows(random_rows(32)), scale_rows(random_rows(48))
    expected = multiply_restored(*states, *weight, torch.float32)
    found = multiply_scaled(*states, *weight, torch.float32)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-2)  # it answers in bf16


def test_no_tokens_product_depends_on_its_company() -> None:
    scaled = ScaledLinear(nn.Linear(SIZE, SIZE).eval())
    states = random_rows(9)
    together = scaled(states)
    alone = torch.cat([scaled(states[row : row + 1]) for row in range(9)])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-4)
    numbers, scales = scale_rows(states)
    for row in range(9):
        own, own_scale = scale_rows(states[row : row + 1])
        assert torch.equal(own.float()[0], numbers.float()[row])
        assert torch.equal(own_scale[0], scales[row])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((SIZE, SIZE), True), ((SIZE + 16, SIZE), True), ((SIZE, SIZE - 16), False), ((SIZE + 8, SIZE), False)],
)
def test_layers_that_are_large_and_even_enough_are_taken(shape: tuple[int, int], expected: bool) -> None:
    assert is_scalable(nn.Linear(*shape)) == expected


def test_large_layers_are_replaced_joined_ones_too_and_none_is_held_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = network_of(Block(), Block(), Block())
    fuse_projections(network)
    weights = [weakref.ref(module.weight) for module in network.transformer.modules() if is_scalable(module)]
    assert len(weights) == 3
    held: list[int] = []

    def count(rows: Tensor) -> tuple[Tensor, Tensor]:
        held.append(sum(reference() is not None for reference in weights))
        return scale_rows(rows)

    monkeypatch.setattr(scaled_products, "scale_rows", count)
    scale_layers(network)
    assert held == [3, 2, 1]
    assert sum(type(module) is ScaledLinear for module in network.transformer.modules()) == 3
    assert sum(type(module) is nn.Linear for module in network.transformer.modules()) == 3, "the small ones"
    numbers = [module.numbers for module in network.transformer.modules() if type(module) is ScaledLinear]
    assert all(each.element_size() == 1 and each.shape == (3 * SIZE, SIZE) for each in numbers)


def test_a_model_of_small_layers_says_so() -> None:
    with pytest.raises(ValueError, match="no layer has a weight of 1024 by 1024 or more"):
        scale_layers(network_of(Block(64)))


def test_what_differs_too_much_has_to_be_loaded_again_because_it_cannot_be_undone() -> None:
    network = network_of(Block())
    states = random_rows(5)

    def probe() -> list[Tensor]:
        product = network.transformer.layers[0].q_proj(states)
        is_scaled = isinstance(network.transformer.layers[0].q_proj, ScaledLinear)
        return [product.flip(0) if is_scaled else product]

    measured = SwitchChoice("fp8", True, "measured", False)
    with pytest.raises(
        NotUndone, match=r"^The switch fp8 is off, because with it the network deviates"
    ) as error:
        apply_switches(network, [measured], probe)
    assert not error.value.choice.is_on
    with pytest.raises(ModelError, match="The switch fp8 cannot be used"):
        apply_switches(
            network_of(Block(64)), [SwitchChoice("fp8", True, "asked for", True)], lambda: [states]
        )
