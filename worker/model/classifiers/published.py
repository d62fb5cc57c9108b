"""Published: models whose files transformers cannot read by itself, as they were published. Runs nothing.

StructBERT's config.json says neither `model_type` nor architecture, and its tensors are called `encoder.…`. Left to
itself transformers would find none of them, and begin with a random encoder in silence: so each name is given
outright, and each has to be there.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig

from vectormill.domain.errors import ModelError
from vectormill.models.classifiers import STRUCTBERT
from vectormill.models.model_card import ModelCard, find_weights

# Of StructBERT: how its names begin, and what a BERT calls the same.
_STRUCTBERT_PREFIX, _BERT_PREFIX = "encoder.", "bert."
_STRUCTBERT_ONLY = frozenset({"base_model_prefix"})
# A table 0, 1, 2, …, which later versions make anew.
_BUFFERS = frozenset({"bert.embeddings.position_ids"})


def is_published(card: ModelCard) -> bool:
    """Whether the model's files need what is here."""
    return card.classifier is not None and card.classifier.architecture == STRUCTBERT


def load_config(card: ModelCard, **more: Any) -> Any:
    """The transformers configuration. Raises what transformers does."""
    if not is_published(card):
        return AutoConfig.from_pretrained(card.path, local_files_only=True, trust_remote_code=False, **more)
    values = json.loads((card.path / "config.json").read_text(encoding="utf-8"))
    return BertConfig(**{key: value for key, value in values.items() if key not in _STRUCTBERT_ONLY}, **more)


def list_published_names(card: ModelCard) -> Callable[[str], str]:
    """What transformers calls a tensor of the model's files."""
    if not is_published(card):
        return lambda stored: stored
    return lambda stored: _rename(stored, _STRUCTBERT_PREFIX, _BERT_PREFIX)


def load_published(card: ModelCard, config: Any, dtype: torch.dtype) -> nn.Module:
    """The bare transformer of a model whose every tensor is named. Raises ModelError when they are not these."""
    config.num_labels = card.dimension
    with torch.device("meta"):
        outline = AutoModelForSequenceClassification.from_config(config)
    tensors = read_published(card, outline.state_dict())
    # transformers itself would let a name that does not fit pass, with a warning.
    whole = type(outline).from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)
    transformer: nn.Module = whole.base_model
    return transformer


def read_published(card: ModelCard, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a whole model, by their names in transformers, of which `wanted` has each with its shape.

    Raises ModelError for one that is missing, is too many, or has another shape.
    """
    rename = list_published_names(card)
    found: dict[str, Tensor] = {}
    for path in find_weights(card.path, card.name):
        with safe_open(path, framework="pt") as file:
            found |= {rename(stored): file.get_tensor(stored) for stored in file.keys()}  # noqa: SIM118 - no mapping
    found = {name: tensor for name, tensor in found.items() if name not in _BUFFERS}
    flaws = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    flaws += [f"{name} is nothing that this model has" for name in sorted(found.keys() - wanted.keys())]
    flaws += [
        f"{name} has the shape {list(found[name].shape)} instead of {list(wanted[name].shape)}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name].shape != wanted[name].shape
    ]
    if flaws:
        more = f", and {len(flaws) - 3} more" if len(flaws) > 3 else ""
        raise ModelError(
            f"The weights in {card.path} are not those of the model {card.name!r}: {'; '.join(flaws[:3])}{more}."
        )
    return found


def _rename(stored: str, before: str, after: str) -> str:
    return after + stored.removeprefix(before) if stored.startswith(before) else stored
