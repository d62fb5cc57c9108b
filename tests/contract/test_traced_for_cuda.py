"""The flash kernels in a compiled graph, without a card: traced with tensors that are nothing but shapes on one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from worker.model.packed import direct_kernel, varlen_kernel

pytestmark = pytest.mark.tail


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 64)])
@pytest.mark.parametrize(
    ("kernel", "operator"),
    [
        (varlen_kernel, "torch_attn._varlen_attn"),
        (direct_kernel, "aten._flash_attention_forward"),
    ],
)
def test_attention_is_one_call_of_the_kernels_operator_whatever_the_lengths(
    kernel: Callable[..., Tensor], operator: str, window: tuple[int, int]
) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
        return kernel(query, key, value, bounds, 50, None, window)

    with FakeTensorMode(shape_env=ShapeEnv()):
        query = torch.empty(130, 4, 64, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(130, 2, 64, dtype=torch.bfloat16, device="cuda")
        bounds = torch.empty(6, dtype=torch.int32, device="cuda")
    traced: Any = make_fx(attend, tracing_mode="symbolic")(query, key, key, bounds)
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert [name for name in calls if name.startswith(operator)] == [f"{operator}.default"]
    (output,) = (node.args[0].meta["val"] for node in traced.graph.nodes if node.op == "output")
    assert output.shape == query.shape
    assert output.device.type == "cuda"
