"""What a model's files say of its labels and of what is made of its numbers, and what they must not say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.classifiers import STRUCTBERT
from vectormill.domain.errors import ModelError
from vectormill.models.classifiers import read_classifier
from vectormill.models.model_card import Classifier
from vectormill.models.model_entry import ModelEntry
from vectormill.models.model_files import ModelFiles


def read(directory: Path, config: dict[str, Any]) -> Classifier:
    whole = {"architectures": ["BertForSequenceClassification"], "model_type": "bert", **config}
    (directory / "config.json").write_text(json.dumps(whole))
    found = read_classifier(ModelFiles("m", directory, ModelEntry(path=str(directory))))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": {"1": "yes", "0": "no"}}, ("no", "yes"), "softmax"),
        ({"id2label": {"0": "LABEL_0"}}, ("LABEL_0",), "sigmoid"),
        # Labels of which several hold at once, each for itself, as transformers' own pipeline reads them.
        (
            {"id2label": {"0": "toxic", "1": "rude"}, "problem_type": "multi_label_classification"},
            ("toxic", "rude"),
            "sigmoid",
        ),
        ({"problem_type": "single_label_classification"}, ("LABEL_0", "LABEL_1"), "softmax"),
        (
            {
                "problem_type": "multi_label_classification",
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ("LABEL_0", "LABEL_1"),
            "raw",
        ),
        (
            {"id2label": {"0": "", "1": "a.b", "2": "日本 \U0001f600"}},
            ("", "a.b", "日本 \U0001f600"),
            "softmax",
        ),
    ],
)
def test_labels_and_activation_are_the_models_own(
    tmp_path: Path, config: dict[str, Any], labels: tuple[str, ...], activation: str
) -> None:
    found = read(tmp_path, config)
    assert (found.labels, found.activation) == (labels, activation)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"0": "same", "1": "other", "2": "same"}, "'same' of model 'm' occurs twice"),
        ({"0": "a\0b", "1": "c"}, "NUL"),
        ({"zero": "a"}, "'zero'"),
    ],
)
def test_labels_that_cannot_be_told_apart_or_stored_are_refused(
    tmp_path: Path, labels: dict[str, str], said: str
) -> None:
    with pytest.raises(ModelError, match="id2label") as refused:
        read(tmp_path, {"id2label": labels})
    assert said in str(refused.value)
    str(refused.value).encode()


def test_labels_of_structbert_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "label_mapping.json").write_text('{"same": "yes", "other": "no"}')
    shutil.copy(STRUCTBERT / "model" / "config.json", tmp_path)
    with pytest.raises(ModelError, match="label_mapping"):
        read_classifier(ModelFiles("m", tmp_path, ModelEntry(path=str(tmp_path))))
