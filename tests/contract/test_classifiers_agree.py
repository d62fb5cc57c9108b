"""A classifier's numbers are those of transformers and of StructBERT's own code, alone and in any batch."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as read_torch

from tests.classifiers import (
    CLASSIFIERS,
    MAX_TOKENS,
    PAIRS,
    STRUCTBERT,
    judge,
    load_classifier,
    reference_logits,
    write_classifier,
)
from tests.models import read_card
from vectormill.domain.errors import ModelError
from vectormill.models.families import FAMILIES, find_layout
from worker.model.heads import HEADS, load_head
from worker.model.network import load_transformer
from worker.parallel.filling import build_skeleton, fill
from worker.tokens.tokenizer import Tokenizer

CASES = [
    case
    for case in json.loads((STRUCTBERT / "cases.json").read_text(encoding="utf-8"))["cases"]
    if case["text_b"] is not None
]
STRUCTBERT_PAIRS = [(case["text_a"], case["text_b"]) for case in CASES]


def test_every_head_is_known_on_both_sides_and_tried_here() -> None:
    assert (
        HEADS.keys()
        == {name for name, family in FAMILIES.items() if family.head_pooling}
        == CLASSIFIERS.keys()
    )


# A pooler, none, a head of its own, a causal one and relative positions; the others are the tail.


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_a_classifier_agrees_with_transformers(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (
        model_type == "qwen2"
    ):  # transformers makes Qwen's own class of any tokenizer.json, so of this BERT's too
        monkeypatch.setattr("worker.model.torch_encoder.check_tokenizer", lambda card: None)
    directory = write_classifier(tmp_path / "model", model_type)
    card = read_card(directory)
    expected = reference_logits(directory)
    assert np.ptp(expected, axis=0).min() > 0.05  # pairs differ by more than what is allowed
    head = load_head(card)
    assert card.find_shape().dense_values == sum(each.numel() for each in head.parameters())
    encoder = load_classifier(card, "torch", tmp_path)
    together = judge(encoder, card)
    assert np.abs(together - expected).max() < 1e-4
    alone = judge(encoder, card, groups=[[index] for index in range(len(PAIRS))])
    assert np.abs(alone - expected).max() < 1e-4


@pytest.mark.parametrize(
    "model_type",
    ["bert", "modernbert", "roberta", "qwen3"],
)
def test_a_packed_classifier_agrees_with_transformers(model_type: str, tmp_path: Path) -> None:
    directory = write_classifier(tmp_path / "model", model_type)
    card = read_card(directory)
    encoder = load_classifier(card, "torch", tmp_path, attention="packed")
    assert encoder.describe().is_packed
    assert np.abs(judge(encoder, card) - reference_logits(directory)).max() < 1e-4


def test_a_head_may_read_the_mean_of_all_tokens(tmp_path: Path) -> None:
    directory = write_classifier(tmp_path / "model", "modernbert", classifier_pooling="mean", num_labels=1)
    card = read_card(directory)
    assert (card.pooling, card.dimension, card.classifier and card.classifier.activation) == (
        ("mean",),
        1,
        "sigmoid",
    )
    assert (
        np.abs(judge(load_classifier(card, "torch", tmp_path), card) - reference_logits(directory)).max()
        < 1e-4
    )


@pytest.mark.parametrize("max_tokens", [512, 128])
def test_structbert_reads_what_its_reference_reads(max_tokens: int) -> None:
    arrays = np.load(STRUCTBERT / "arrays.npz")
    first, second = [pair[0] for pair in STRUCTBERT_PAIRS], [pair[1] for pair in STRUCTBERT_PAIRS]
    read = Tokenizer(STRUCTBERT / "model").tokenize_pairs(first, second, max_tokens, truncate=True)
    for index, case in enumerate(CASES):
        for name in ("input_ids", "token_type_ids"):
            assert (
                read.inputs[name].row(index).tolist() == arrays[f"{case['id']}/{max_tokens}/{name}"].tolist()
            )


@pytest.mark.parametrize("attention", ["padded", "packed"])
def test_structbert_agrees_with_its_reference(attention: str, tmp_path: Path) -> None:
    card = read_card(STRUCTBERT / "model")
    expected = np.array([case["max_length_512"]["logits"] for case in CASES])
    encoder = load_classifier(card, "torch", tmp_path, attention=attention)
    assert np.abs(judge(encoder, card, STRUCTBERT_PAIRS) - expected).max() < 1e-5
    alone = judge(encoder, card, STRUCTBERT_PAIRS, [[index] for index in range(len(CASES))])
    assert np.abs(alone - expected).max() < 1e-5


def test_a_tensor_that_is_missing_or_too_many_is_named(tmp_path: Path) -> None:
    """transformers would make a random encoder of them, with a warning."""
    for change, message in (
        (
            {"remove": "encoder.encoder.layer.1.output.dense.weight"},
            "encoder.encoder.layer.1.output.dense.weight is missing",
        ),
        (
            {"add": "encoder.encoder.layer.9.output.dense.bias"},
            "layer.9.output.dense.bias does not belong to this model",
        ),
        ({"remove": "classifier.bias"}, "classifier.bias is missing"),
    ):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        for file in (STRUCTBERT / "model").iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        tensors = load_file(directory / "model.safetensors")
        if "remove" in change:
            del tensors[change["remove"]]
        else:
            tensors[change["add"]] = np.zeros(32, dtype=np.float32)
        save_file(tensors, directory / "model.safetensors")
        with pytest.raises(ModelError, match=message.replace(".", r"\.")):
            load_classifier(read_card(directory), "torch", tmp_path)


def test_structbert_is_read_from_the_pickle_that_it_is_published_as(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(STRUCTBERT / "model", tmp_path / "model"))
    torch.save(read_torch(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    logits = judge(
        load_classifier(read_card(directory), "torch", tmp_path), read_card(directory), STRUCTBERT_PAIRS
    )
    expected = np.array([case["max_length_512"]["logits"] for case in CASES])
    assert np.abs(logits - expected).max() < 1e-5


@pytest.mark.parametrize(
    "model_type", [*(name for name in sorted(CLASSIFIERS) if FAMILIES[name].layout), "structbert"]
)
def test_ranks_fill_a_classifier_with_what_one_device_reads(model_type: str, tmp_path: Path) -> None:
    directory = STRUCTBERT / "model"
    if model_type != "structbert":
        directory = write_classifier(tmp_path / "model", model_type, vocab_size=100)
    card = read_card(directory)
    skeleton = build_skeleton(card, torch.float32)
    fill(skeleton, card, find_layout(skeleton.config.model_type), torch.device("cpu"))
    filled, whole = skeleton.state_dict(), load_transformer(card, torch.float32).state_dict()
    assert filled.keys() == whole.keys()
    assert all(torch.equal(filled[name], whole[name]) for name in whole)


def test_a_tensor_that_ranks_do_not_find_is_named(tmp_path: Path) -> None:
    directory = write_classifier(tmp_path / "model", "bert", vocab_size=100)
    tensors = load_file(directory / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    card = read_card(directory)
    skeleton = build_skeleton(card, torch.float32)
    with pytest.raises(ModelError, match=r"encoder\.layer\.1\.output\.dense\.weight is missing"):
        fill(skeleton, card, find_layout("bert"), torch.device("cpu"))


def test_a_head_that_is_not_there_is_named(tmp_path: Path) -> None:
    directory = write_classifier(tmp_path / "model", "roberta")
    tensors = load_file(directory / "model.safetensors")
    del tensors["classifier.out_proj.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"would be random: missing classifier\.out_proj\.weight"):
        load_classifier(read_card(directory), "torch", tmp_path)


def test_pairs_that_are_too_long_lose_tokens_of_the_longer_text_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write_classifier(tmp_path / "model", "bert")
    theirs, ours = AutoTokenizer.from_pretrained(directory), Tokenizer(directory)
    words = [chr(ord("a") + number) for number in range(26)]
    pairs = [(" ".join(words[:i]), " ".join(words[-j:])) for i in range(1, 26, 3) for j in range(1, 26, 2)]
    first, second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for max_tokens in (9, 16, 23, MAX_TOKENS):
        expected = theirs(first, second, truncation=True, max_length=max_tokens)
        read = ours.tokenize_pairs(first, second, max_tokens, truncate=True)
        assert [read.inputs["input_ids"].row(i).tolist() for i in range(len(pairs))] == expected["input_ids"]
        assert [read.inputs["token_type_ids"].row(i).tolist() for i in range(len(pairs))] == expected[
            "token_type_ids"
        ]
        assert read.truncated.tolist() == [len(theirs(*pair)["input_ids"]) > max_tokens for pair in pairs]
        failed = ours.tokenize_pairs(first, second, max_tokens, truncate=False)
        assert sorted(failed.failures) == np.flatnonzero(read.truncated).tolist()
