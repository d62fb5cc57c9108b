"""Read from a model's files what its classification head does with a text or a pair. Imports no torch.

Three layouts are read: transformers' `…ForSequenceClassification`; StructBERT's as published, whose
config.json names no architecture (golden data and the reference's code: tests/data/structbert); and generative
rerankers, whose head are the rows of one or two words in the matrix that predicts words.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from vectormill.domain.errors import ModelError
from vectormill.domain.task import RAW, SIGMOID, SOFTMAX, TANH
from vectormill.models.families import FAMILIES, find_family
from vectormill.models.model_card import Classifier
from vectormill.models.model_files import ModelFiles
from vectormill.models.rerankers import Template
from vectormill.models.stored import Stored

SUFFIX: Final = "ForSequenceClassification"
GENERATIVE: Final = "ForCausalLM"
# The label of a reranker, whose single number says how relevant a document is to a query.
RELEVANCE: Final = "relevance"
STRUCTBERT: Final = "SbertForSequenceClassification"

# The activations of a CrossEncoder of sentence-transformers, by the names of torch's classes.
_ACTIVATION_NAMES: Final = {"Sigmoid": SIGMOID, "Identity": RAW, "Softmax": SOFTMAX, "Tanh": TANH}


def read_classifier(files: ModelFiles, template: Template | None = None) -> Classifier | None:
    """Return a model's classification head; None if it has none. Raise ModelError for an unknown head.

    `template` is that of a generative reranker, or of one that was given a head of its own.
    """
    architecture, config = files.architecture, files.config
    if template is not None and template.words and architecture.endswith(GENERATIVE):
        return Classifier(architecture, "last_token", (RELEVANCE,), _read_activation(files, 1), template)
    if is_structbert(config):
        return Classifier(STRUCTBERT, "cls", _read_structbert_labels(files), SOFTMAX)
    if not architecture.endswith(SUFFIX):
        return None
    pooling = find_family(files.model_type).head_pooling
    if not pooling:
        known = ", ".join(family.model_type for family in FAMILIES.values() if family.head_pooling)
        raise ModelError(
            f"The model {files.name!r} is a {architecture}, whose type {files.model_type!r} is not supported for "
            f"scores; supported: {known}."
        )
    if files.model_type == "modernbert":
        pooling = config.take("classifier_pooling", pooling)
    labels = _read_labels(files)
    own = replace(template, true=None, false=None) if template is not None and len(labels) == 1 else None
    return Classifier(architecture, pooling, labels, _read_activation(files, len(labels)), own)


def require_template(name: str, classifier: Classifier | None, wanted: str | None) -> Template | None:
    """Return the template of a reranker. Raise ModelError if one is `wanted` for another kind of model."""
    template = None if classifier is None else classifier.template
    if wanted is not None and template is None:
        raise ModelError(
            f"The model {name!r} is no reranker to which a template applies: it has neither an architecture "
            "…ForCausalLM nor a head with one label, or a pooling is set for it. Remove template from its entry in "
            "VECTORMILL_MODELS."
        )
    return template


def is_structbert(config: Stored) -> bool:
    """Return True for a StructBERT.

    Its configuration names no class: only `base_model_prefix` identifies it.
    """
    return "model_type" not in config.values and config.find("base_model_prefix") == "encoder"


def _read_labels(files: ModelFiles) -> tuple[str, ...]:
    """Return the labels as transformers does: two by default, unless the configuration says otherwise.

    Raise ModelError if labels are equal or cannot be stored.
    """
    by_number = _number_labels(files.name, files.config.take("id2label", {}), "id2label in config.json")
    num_labels = len(by_number) or files.config.take("num_labels", 2, least=1)
    labels = tuple(by_number.get(number, f"LABEL_{number}") for number in range(num_labels))
    for label in labels:  # by which results name a probability
        flaw = ""
        if labels.count(label) > 1:
            flaw = "occurs twice, so results would be ambiguous"
        elif "\0" in label:
            flaw = "contains a NUL character, which cannot be stored"
        if flaw:
            raise ModelError(
                f"The label {label!r} of model {files.name!r} {flaw}; rename it in id2label in config.json."
            )
    return labels


def _number_labels(name: str, labels: Mapping[Any, Any], place: str) -> dict[int, str]:
    """Return the labels by number. Raise ModelError if a key is not a number."""
    try:
        return {int(number): str(label) for number, label in labels.items()}
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"Model {name!r} has an invalid {place}: every key must be an integer ({error})."
        ) from error


def _read_activation(files: ModelFiles, num_labels: int) -> str:
    """Return the activation that sentence-transformers stored, else that of transformers' pipeline.

    Version 4 wrote it to config.json, and later ones write it beside. Another one than torch's plain functions is a
    flaw of the model.
    """
    own, config = files.encoder, files.config
    places = ((own, "activation_fn"), (config.inner("sentence_transformers"), "activation_fn"))
    for place, key in (*places, (config, "sbert_ce_default_activation_function")):
        function = str(place.take(key, ""))
        if function:
            told = _ACTIVATION_NAMES.get(function.rsplit(".", 1)[-1])
            if told is not None and function.startswith("torch."):
                return told
            known = ", ".join(_ACTIVATION_NAMES)
            files.flaws.append(str(place.refuse(key, f"must be one of torch.nn's {known}")))
            break
    # As in transformers' pipeline: if several labels can hold at once, each has its own probability.
    holds_several = config.take("problem_type", "") == "multi_label_classification"
    return SIGMOID if num_labels == 1 or holds_several else SOFTMAX


def _read_structbert_labels(files: ModelFiles) -> tuple[str, ...]:
    """Return the labels from label_mapping.json, else configuration.json, else config.json.

    This is the reference's order.
    """
    name, mapping = files.name, files.read("label_mapping.json")
    model = files.read("configuration.json").inner("model")
    found = mapping.values or model.take("label2id", {}) or files.config.take("label2id", {})
    numbers = _number_labels(name, {number: label for label, number in found.items()}, "label_mapping.json")
    if sorted(numbers) != list(range(len(numbers))) or not numbers:
        raise ModelError(
            f"The labels of model {name!r} are not numbered from 0, or there are none; label_mapping.json in "
            f'{files.directory} should map each label to its number: {{"label": number}}.'
        )
    return tuple(numbers[number] for number in range(len(numbers)))
