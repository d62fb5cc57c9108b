"""Rounded shards: the parts of compressed weights that one rank holds, rounded as the whole ones are. Reads no files.

Cut by rows, as columns of tensor parallelism and full sharding do, a weight keeps every group of numbers that share a
scale; cut by inputs, only where no cut goes through a group.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

from worker.model.weights.quantization import RoundedEmbedding, RoundedLinear, find_compressible


class SummedLinear(RoundedLinear):
    """Some of the inputs of a linear layer: what all ranks make of theirs is summed, and the bias added once."""

    def forward(self, states: Tensor) -> Tensor:
        output = linear(states, self.weight)
        dist.all_reduce(output)
        return output if self.bias is None else output + self.bias


def hold_rounded(skeleton: nn.Module) -> dict[str, Tensor]:
    """Replace the modules that a single device would compress by compressed ones, still to be filled.

    Before full sharding, which then cuts what they hold; behind tensor parallelism, whose cuts it takes over. Answers
    those by the name of the parameter that was cut. Raises ModelError where a cut goes through a group.
    """
    paths = {module: path for path, module in skeleton.named_modules()}
    cuts: dict[str, Tensor] = {}
    for parent, name, child in find_compressible(skeleton):
        weight, bias = child.weight, getattr(child, "bias", None)
        for leaf, parameter in (("weight", weight), ("bias", bias)):
            if isinstance(parameter, DTensor):
                cuts[f"{paths[child]}.{leaf}"] = parameter
        setattr(parent, name, _make_rounded(child, weight, bias))
    return cuts


def _make_rounded(child: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Module:
    own = _own_part(weight)
    if isinstance(child, nn.Embedding):
        return RoundedEmbedding(own.shape, weight.dtype)
    own_bias = None if bias is None else nn.Parameter(_own_part(bias), requires_grad=False)
    is_summed = isinstance(weight, DTensor) and weight.placements[0] == Shard(1)
    kind = SummedLinear if is_summed else RoundedLinear
    return kind(own.shape, weight.dtype, own_bias, weight.shape[1])


def _own_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
