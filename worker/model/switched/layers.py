"""Layers: where a network has them."""

from torch import nn


def find_layers(transformer: nn.Module) -> list[nn.Module]:
    """Return the list that holds most of the model's weights; of lists in lists the outer one.

    Raises ValueError where there is none.
    """
    lists = [module for module in transformer.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError("its layers are in no list")
    return list(max(lists, key=_count_weights))


def _count_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
