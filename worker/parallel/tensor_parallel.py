"""Tensor parallelism: every rank has some heads and some intermediate values of every layer. Applied from outside."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vectormill.domain.errors import ModelError
from worker.parallel.layouts import Layout


def apply_tensor_parallel(transformer: nn.Module, layout: Layout, mesh: DeviceMesh) -> None:
    """Cut the linear layers of every layer, whose parameters may still be on the meta device.

    Raises ModelError when heads or intermediate values do not divide by the number of ranks, or no layer can be cut.
    """
    config, ranks = transformer.config, mesh.size()
    if layout.tensor_obstacle:
        raise ModelError(
            f"A model of the architecture {config.model_type!r} cannot be tensor parallel: {layout.tensor_obstacle}; "
            "use pipeline or fully_sharded."
        )
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for count, what in (
        (config.num_attention_heads, "attention heads"),
        (key_heads, "heads of keys"),
        (config.intermediate_size, "intermediate values"),
    ):
        if count % ranks:
            divisors = ", ".join(
                str(size) for size in range(2, count + 1) if count % size == 0 and size <= 64
            )
            raise ModelError(
                f"{count} {what} cannot be divided among {ranks} devices; they can among {divisors}."
            )
    plan = {path: ColwiseParallel() for path in layout.columns}
    plan |= {path: RowwiseParallel() for path in layout.rows}
    for layer in transformer.get_submodule(layout.layers):
        parallelize_module(layer, mesh, plan)
