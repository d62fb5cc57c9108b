"""Merge an adapter into the weights of a transformer, so that it costs nothing when texts are encoded."""

from collections import defaultdict

import torch
from torch import Tensor, nn

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import Adapter, ModelCard
from vectormill.models.weights import find_weights
from worker.model.weights import read_tensors

_PEFT_PREFIX = "base_model.model."


@torch.no_grad()
def merge_adapter(transformer: nn.Module, card: ModelCard, adapter: Adapter) -> None:
    """Add the product of an adapter's two matrices to each weight that it changes.

    As `merge_and_unload` of peft. Raises ModelError if the adapter belongs to another model.
    """
    folder = card.path / adapter.folder
    matrices: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, matrix in read_tensors(find_weights(folder, f"{card.name}/{adapter.folder}")).items():
        module, _, kind = key.removeprefix(_PEFT_PREFIX).removesuffix(".weight").partition(".lora_")
        matrices[module][kind.removeprefix("embedding_")] = matrix.float()
    modules = dict(transformer.named_modules())
    own_prefix = f"{getattr(transformer, 'base_model_prefix', '')}."
    for place, pair in matrices.items():
        changed = modules.get(place) or modules.get(place.removeprefix(own_prefix))
        weight = getattr(changed, "weight", None)
        product = pair["B"] @ pair["A"] * adapter.scaling if pair.keys() == {"A", "B"} else None
        if product is not None and isinstance(changed, nn.Embedding):
            product = product.T
        if weight is None or product is None or product.shape != weight.shape:
            raise ModelError(
                f"The adapter {adapter.folder!r} of model {card.name!r} does not fit its weights at {place!r}."
            )
        weight.copy_(weight.float() + product)
