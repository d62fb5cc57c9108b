"""Full sharding: every rank keeps a slice of every tensor, and gathers a layer's weights while it needs them.

Source: Zhao et al., PyTorch FSDP (2023); here for inference, through torch's `fully_shard`.
"""

from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from worker.parallel.layouts import Layout


def apply_fully_sharded(transformer: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Cut parameters along their first dimension. Each layer's are gathered while the one before computes."""
    layers = list(transformer.get_submodule(layout.layers))
    # A unit of its own, so that a vocabulary is whole only while it is looked up, and not beside every layer.
    fully_shard(transformer.get_submodule(layout.embeddings), mesh=mesh, reshard_after_forward=True)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(transformer, mesh=mesh, reshard_after_forward=True)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
