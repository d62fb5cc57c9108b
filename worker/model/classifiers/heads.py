"""Heads: from the state that a classifier reads to a number for each label. Knows no pooling.

A classifier is a transformer, a pooling that gives one vector a sequence, and a head on that vector: so it is packed,
padded, converted and shared like any encoder. tests/contract/test_classifiers_agree.py compares each row with the whole
model of transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import ModelCard
from worker.model.classifiers.published import outline_classifier, read_tensors
from worker.model.runtime import transformers


def _with_bert_pooler(model: Any) -> nn.Module:
    pooler = model.base_model.pooler
    return nn.Sequential(pooler.dense, pooler.activation, model.classifier)


def _with_albert_pooler(model: Any) -> nn.Module:
    return nn.Sequential(model.base_model.pooler, model.base_model.pooler_activation, model.classifier)


def _with_context_pooler(model: Any) -> nn.Module:
    act = transformers.activations.get_activation(model.config.pooler_hidden_act)
    return nn.Sequential(model.pooler.dense, act, model.classifier)


def _with_tanh(model: Any) -> nn.Module:
    return nn.Sequential(model.classifier.dense, nn.Tanh(), model.classifier.out_proj)


def _with_gelu(model: Any) -> nn.Module:
    return nn.Sequential(
        model.classifier.dense, transformers.activations.get_activation("gelu"), model.classifier.out_proj
    )


def _with_relu(model: Any) -> nn.Module:
    return nn.Sequential(model.pre_classifier, nn.ReLU(), model.classifier)


def _with_norm(model: Any) -> nn.Module:
    return nn.Sequential(model.head, model.classifier)


def _alone(model: Any) -> nn.Module:
    return nn.Sequential(model.score)


# The architectures of vectormill.models.classifiers.HEAD_POOLING, which says which state each reads.
HEADS: Final[Mapping[str, Callable[[Any], nn.Module]]] = {
    "albert": _with_albert_pooler,
    "bert": _with_bert_pooler,
    "camembert": _with_tanh,
    "deberta": _with_context_pooler,
    "deberta-v2": _with_context_pooler,
    "distilbert": _with_relu,
    "electra": _with_gelu,
    "llama": _alone,
    "mistral": _alone,
    "modernbert": _with_norm,
    "qwen2": _alone,
    "qwen3": _alone,
    "roberta": _with_tanh,
    "xlm-roberta": _with_tanh,
}


def load_head(card: ModelCard) -> nn.Module:
    """Load the head: [n, hidden] -> [n, labels], in fp32. No other weights are read. Raises ModelError if one is
    missing.

    The work is one product a sequence: fp32 costs nothing here, and a score's error would be seen.
    """
    head, names = outline_head(card)
    values = read_tensors(card, names.values())
    if missing := sorted(set(names.values()) - values.keys()):
        raise ModelError(
            f"The weights in {card.path} do not fill the head of model {card.name!r}: {', '.join(missing)} "
            "are missing, and would be random."
        )
    head.to_empty(device="cpu").float()
    try:
        head.load_state_dict({own: values[name].float() for own, name in names.items()})
    except RuntimeError as error:
        raise ModelError(
            f"The weights in {card.path} do not fit the head of model {card.name!r}: {error}"
        ) from error
    return head.eval().requires_grad_(False)


def outline_head(card: ModelCard) -> tuple[nn.Module, dict[str, str]]:
    """Return the head without weights, and transformers' name of each parameter in the whole model."""
    model = outline_classifier(card)
    head = HEADS[model.config.model_type](model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return head, {own: names[id(parameter)] for own, parameter in head.named_parameters()}
