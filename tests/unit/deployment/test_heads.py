"""Tests of the cards that the registry reads from the files of sparse and multi-vector models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests.models import packaged_model
from tests.unit.deployment.test_refused_models import config_of
from tests.unit.deployment.test_registry import card_of, modules, write_model
from vectormill.domain.errors import InvalidOption, ModelError
from vectormill.models.model_card import DenseLayer, SparseHead, TokenHead
from vectormill.models.registry import EncodingOptions, make_spec

VOCABULARY = {"[PAD]": 0, "[unused0]": 1, "[unused1]": 2, "[MASK]": 3, "!": 4, "[Q] ": 5}
TOKENIZER = {"model": {"vocab": VOCABULARY}}
NAMED = {"mask_token": "[MASK]"}
PYLATE = modules("Transformer", "Dense", prefix="pylate.models.")
DENSE = {"in_features": 4, "out_features": 3, "bias": False}


def write_colbert(directory: Path, **files: Any) -> Path:
    return write_model(
        directory, **{"tokenizer": TOKENIZER, "tokenizer_config": NAMED, "1_Dense__config": DENSE, **files}
    )


def test_a_bge_m3_has_three_outputs_and_gives_dense_vectors_by_default(tmp_path: Path) -> None:
    card = card_of(write_random_embedder(SMALL, packaged_model(), tmp_path / "m3"))
    assert card.outputs == ("dense", "sparse", "multi_vector")
    assert (card.dimension, card.sparse_dimensions, card.token_dimensions) == (64, 30522, 64)
    assert card.sparse_head == SparseHead("sparse_linear.safetensors", left_out=(101, 0, 100))
    spec = make_spec(card, EncodingOptions())
    assert (spec.outputs, spec.dimensions, spec.pooling, spec.normalize) == ("dense", 64, "cls", True)


@pytest.mark.parametrize("file", ["sparse_linear.safetensors", "colbert_linear.safetensors"])
def test_another_head_is_another_revision(file: str, tmp_path: Path) -> None:
    directory = write_random_embedder(SMALL, packaged_model(), tmp_path / "m3")
    before = card_of(directory)
    content = bytearray((directory / file).read_bytes())
    content[-300] ^= 1
    (directory / file).write_bytes(content)
    assert card_of(directory).revision != before.revision
    (directory / file).unlink()
    assert len(card_of(directory).outputs) == 2


@pytest.mark.parametrize("first", ["Transformer", "MLMTransformer"])
def test_the_modules_of_a_splade_say_how_its_weights_are_made(first: str, tmp_path: Path) -> None:
    pooling = {"pooling_strategy": "sum", "activation_function": "log1p_relu"}
    files = {"config": config_of("BertForMaskedLM") | {"vocab_size": 9}, "1_SpladePooling__config": pooling}
    card = card_of(write_model(tmp_path, modules=modules(first, "SpladePooling"), **files))
    assert (card.outputs, card.sparse_dimensions, card.dimension, card.pooling) == (("sparse",), 9, 0, ())
    assert card.sparse_head == SparseHead(sums=True, num_logs=2)
    spec = make_spec(card, EncodingOptions())
    assert (spec.outputs, spec.dimensions, spec.sparse_dimensions) == ("sparse", 0, 9)
    with pytest.raises(InvalidOption, match="cosines of dense vectors, and it has none"):
        make_spec(card, EncodingOptions(task="score"))


def test_a_plain_masked_language_model_is_a_splade_by_its_name_or_its_entry(tmp_path: Path) -> None:
    config = config_of("BertForMaskedLM") | {"vocab_size": 9}
    named = card_of(write_model(tmp_path / "naver-splade-v3", config=config))
    told = card_of(write_model(tmp_path / "other", config=config), pooling="splade")
    for card in (named, told):
        assert (card.outputs, card.sparse_head) == (("sparse",), SparseHead())
        assert "the largest weight of a word is used" in card.notes[0]


def test_a_colbert_of_stanford_is_read_with_its_settings(tmp_path: Path) -> None:
    directory = write_colbert(tmp_path, config=config_of("HF_ColBERT"))
    told = {"query_maxlen": 16, "doc_maxlen": 50, "query_token_id": "[unused0]", "doc_token_id": "[unused1]"}
    (directory / "artifact.metadata").write_text(json.dumps(told))
    save_file({"linear.weight": np.zeros((3, 4), np.float32)}, directory / "model.safetensors")
    card = card_of(directory)
    assert (card.outputs, card.token_dimensions, card.max_tokens) == (("multi_vector",), 3, 50)
    assert (card.prompts, card.default_prompt) == (
        {"query": "[unused0] ", "document": "[unused1] "},
        "[unused1] ",
    )
    assert card.token_head == TokenHead(
        prefix="linear.",
        skiplist=(4,),
        query_prompt="[unused0] ",
        markers=(("[unused0] ", 1), ("[unused1] ", 2)),
        most_query_tokens=16,
        fewest_query_tokens=16,
        filler=3,
    )
    before = card.revision
    (directory / "artifact.metadata").write_text(json.dumps(told | {"doc_maxlen": 51}))
    assert card_of(directory).revision != before
    save_file({"bert.weight": np.zeros((3, 4), np.float32)}, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack linear\.weight, the projection"):
        card_of(directory)


def test_a_colbert_of_pylate_is_read_with_its_settings(tmp_path: Path) -> None:
    told = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12}
    told |= {"document_length": 60, "skiplist_words": [], "prompts": {"query": "find: "}}
    card = card_of(write_colbert(tmp_path, modules=PYLATE, config_sentence_transformers=told))
    assert card.token_head == TokenHead(
        dense=(DenseLayer("1_Dense", 4, 3, has_bias=False, activation="Tanh", has_residual=False),),
        query_prompt="[Q] ",
        markers=(("[Q] ", 5),),  # the other one is no token, and is put before a text as it is
        most_query_tokens=12,
        fewest_query_tokens=12,
        filler=3,
    )
    assert (card.prompts["query"], card.default_prompt, card.max_tokens) == ("[Q] find: ", "[D] ", 60)


@pytest.mark.parametrize(
    ("told", "files", "message"),
    [
        ({"query_prefix": "", "document_prefix": ""}, {}, "does not tell them apart"),
        (
            {"query_prefix": "[Q] "},
            {"tokenizer_config": {}},
            "fills up queries with mask tokens, which its tokenizer",
        ),
        (
            {"query_prefix": "[Q] "},
            {"config": config_of("Qwen3Model", model_type="qwen3")},
            "not supported for a model that reads from left to right",
        ),
    ],
)
def test_a_colbert_whose_queries_cannot_be_made_is_refused(
    told: dict[str, Any], files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {"model_type": "ColBERT", **told}
    with pytest.raises(ModelError, match=message):
        card_of(write_colbert(tmp_path, modules=PYLATE, config_sentence_transformers=config, **files))


def test_a_late_interaction_model_that_keeps_the_tokens_of_images_is_refused(tmp_path: Path) -> None:
    kinds = modules("Transformer", "Dense", "MultiVectorMask", "Normalize")
    mask = {"keep_only_token_ids": [7]}
    with pytest.raises(ModelError, match=r"keep_only_token_ids.*images are not supported"):
        card_of(write_colbert(tmp_path, modules=kinds, **{"2_MultiVectorMask__config": mask}))
