"""Which models the registry refuses, and the sentence that says what they are and what to do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.unit.deployment.test_registry import card_of, modules, write_model
from vectormill.domain.errors import InvalidOption, ModelError
from vectormill.models.registry import EncodingOptions, Registry, make_spec
from vectormill.settings import ModelEntry


@pytest.mark.parametrize(
    ("files", "entry", "message"),
    [
        ({"config": None}, {}, "has no config.json"),
        ({"tokenizer": None}, {}, "has no tokenizer.json"),
        ({"modules": modules("Transformer", "LSTM")}, {}, "made of Transformer, LSTM"),
        (
            {"modules": modules("Router", "SpladePooling")},
            {},
            "a model with a path of its own for queries, made of Router",
        ),
        (
            {"modules": modules("SparseStaticEmbedding")},
            {},
            "a sparse encoder that weighs the words of queries without a transformer",
        ),
        (
            {"modules": modules("Transformer", "Dense", "HierarchicalTokenPooling", "MultiVectorMask")},
            {},
            r"a late-interaction model \(ColBERT\) made of Transformer, Dense, HierarchicalTokenPooling",
        ),
        ({}, {"pooling": "splade"}, "cannot be used with the pooling splade: it is no …ForMaskedLM"),
        (
            {"modules": modules("Transformer", "Pooling", "LogitScore")},
            {},
            "made of Transformer, Pooling, Logit",
        ),
        ({"modules": modules("StaticEmbedding", "Dense")}, {}, "Only Normalize may follow StaticEmbedding"),
        ({"modules": modules("StaticEmbedding")}, {}, "has no table embeddings or embedding.weight"),
        ({"modules": modules("StaticEmbedding")}, {"pooling": "cls"}, "whose mean is the vector"),
        ({"modules": modules("StaticEmbedding")}, {"template": "qwen3-reranker"}, "is no reranker"),
        ({}, {"pooling": "median"}, "expected one of cls, max, mean"),
        ({}, {"max_tokens": 65}, "exceeds the 64 tokens"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, files: dict[str, Any], entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        card_of(write_model(tmp_path, **files), **entry)


def config_of(*architectures: str, model_type: str = "bert") -> dict[str, Any]:
    sizes = {"hidden_size": 4, "max_position_embeddings": 64}
    return sizes | {"model_type": model_type} | ({"architectures": architectures} if architectures else {})


@pytest.mark.parametrize(
    ("config", "name", "message"),
    [
        (config_of("BertForMaskedLM"), "bert-base", r"a masked language model.*BertForMaskedLM.*its pooling"),
        (config_of("Qwen2ForCausalLM", model_type="qwen2"), "qwen", "a causal language model.*its pooling"),
        (
            config_of("Qwen3ForCausalLM", model_type="qwen3"),
            "tuned-reranker",
            "a generative reranker.*if it scores as one of qwen3-reranker, .* set that as its template",
        ),
        (
            config_of("LayerWiseMiniCPMForCausalLM", model_type="minicpm"),
            "bge-reranker-v2-minicpm-layerwise",
            r"a layerwise reranker \(bge-reranker-v2-minicpm-layerwise\).*code of its own.*no task supports it",
        ),
        (
            config_of("CostWiseGemmaForCausalLM", model_type="cost_wise_gemma"),
            "bge-reranker-v2.5-gemma2-lightweight",
            r"a layerwise reranker \(bge-reranker-v2.5-gemma2-lightweight\).*no task supports it",
        ),
        (config_of("BertForTokenClassification"), "ner", "a model that labels tokens.*no task"),
        (config_of("Qwen3Model", model_type="qwen3"), "bare", "of the architecture Qwen3Model.*its pooling"),
        (config_of("Something"), "new", "of the architecture Something.*its pooling"),
        (config_of(), "nameless", "its config.json names no architecture.*its pooling"),
    ],
)
def test_a_model_that_nothing_says_how_to_encode_is_refused_by_what_it_is_unless_a_pooling_is_given(
    tmp_path: Path, config: dict[str, Any], name: str, message: str
) -> None:
    write_model(tmp_path, config=config)
    with pytest.raises(ModelError, match=message):
        Registry({name: ModelEntry(path=str(tmp_path))}).card(name)
    card = Registry({name: ModelEntry(path=str(tmp_path), pooling="cls")}).card(name)
    assert card.pooling == ("cls",)
    assert "used with cls pooling as set in VECTORMILL_MODELS" in card.notes[0]


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "Qwen3ForCausalLM", "NewModel"])
def test_modules_say_how_a_model_of_any_architecture_is_encoded(tmp_path: Path, architecture: str) -> None:
    """As all-mpnet-base-v2, gte-modernbert-base and Qwen3-Embedding are published."""
    write_model(
        tmp_path,
        config=config_of(architecture),
        modules=modules("Transformer", "Pooling"),
        **{"1_Pooling__config": {"pooling_mode_cls_token": True}},
    )
    card = card_of(tmp_path)
    assert (card.pooling, card.notes) == (("cls",), ())


@pytest.mark.parametrize(
    ("tensor", "head"),
    [("classifier.weight", "a classifier's head"), ("linear.weight", "ColBERT's projection")],
)
def test_a_head_that_would_be_left_out_is_named_and_its_scores_do_not_become_cosines(
    tmp_path: Path, tensor: str, head: str
) -> None:
    write_model(tmp_path)
    save_file({tensor: np.arange(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"its weights include {head} \({tensor}\), which would be ignored"):
        card_of(tmp_path)
    card = card_of(tmp_path, pooling="mean")
    assert f"{head} ({tensor}) is ignored" in card.notes[0]
    assert make_spec(card, EncodingOptions()).pooling == "mean"
    with pytest.raises(InvalidOption, match=rf"cannot compute scores.*{head} \({tensor}\)"):
        make_spec(card, EncodingOptions(task="score"))


def test_pickled_weights_are_refused_and_the_way_out_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.ckpt")
    with pytest.raises(ModelError, match=r"model\.ckpt, which is not read.*save_pretrained"):
        card_of(tmp_path)


@pytest.mark.parametrize("path", ["../other", "/etc", "1_Pooling/../../other"])
def test_a_module_outside_the_model_s_directory_is_refused(tmp_path: Path, path: str) -> None:
    directory = write_model(
        tmp_path / "model",
        modules=[modules("Transformer")[0], {**modules("Transformer", "Pooling")[1], "path": path}],
    )
    (tmp_path / "model" / "1_Pooling").mkdir()
    write_model(tmp_path / "other", config={"pooling_mode_cls_token": True})
    with pytest.raises(ModelError, match=r"refers to a path outside the model directory"):
        card_of(directory)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_symbolic_link_that_leads_a_module_out_is_refused(tmp_path: Path, is_folder: bool) -> None:
    directory = write_model(tmp_path / "model", modules=modules("Transformer", "Pooling"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    if is_folder:
        (directory / "1_Pooling").symlink_to(other)
    else:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").symlink_to(other / "config.json")
    with pytest.raises(
        ModelError, match=r"refers to a path outside the model directory.*Copy the missing files"
    ):
        card_of(directory)


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        (
            "JinaBertForMaskedLM",
            {},
            r"jina-embeddings-v2 \(JinaBertForMaskedLM\), whose code .* is never run; no conv",
        ),
        ("NewModel", {}, "take a revision whose config.json has the model_type gte"),
        ("NomicBertModel", {"n_embd": 4}, "has hidden_size instead of n_embd"),
        ("NVEmbedModel", {}, "NV-Embed, which pools by layers of attention of its own"),
    ],
)
def test_a_model_whose_code_only_its_repository_has_is_named_with_what_to_take_instead(
    tmp_path: Path, architecture: str, more: dict[str, Any], message: str
) -> None:
    """With modules.json, which says how it pools but not what is pooled."""
    layout: dict[str, Any] = {"1_Pooling__config": {"pooling_mode": "mean"}}
    config = config_of(architecture) | {"auto_map": {"AutoModel": "modeling.Model"}} | more
    write_model(tmp_path, config=config, modules=modules("Transformer", "Pooling"), **layout)
    with pytest.raises(ModelError, match=message):
        card_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(architecture)))  # as a conversion has it
    assert card_of(tmp_path).pooling == ("mean",)


JINA_TASKS = {"lora_adaptations": ["retrieval.query", "retrieval.passage"]}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            config_of("XLMRobertaModel") | JINA_TASKS,
            r"\(LoRA\) for each task \(retrieval.query, retrieval.passage\)",
        ),
        (config_of("JinaEmbeddingsV3Model"), r"\(LoRA\) for each task"),
    ],
)
@pytest.mark.parametrize("has_modules", [True, False])
def test_a_model_with_an_adapter_for_each_task_is_refused_unless_a_pooling_is_given(
    tmp_path: Path, config: dict[str, Any], named: str, has_modules: bool
) -> None:
    layout: dict[str, Any] = {"1_Pooling__config": {"pooling_mode": "mean"}}
    write_model(
        tmp_path,
        config=config,
        **layout | {"modules": modules("Transformer", "Pooling") if has_modules else None},
    )
    with pytest.raises(ModelError, match=rf"{named}, and none is chosen.*whose adapters are folders"):
        card_of(tmp_path)
    assert "adapters outside its weights are ignored" in card_of(tmp_path, pooling="mean").notes[0]


@pytest.mark.parametrize(
    ("prompts", "default", "is_said"),
    [
        ({"query": "query: ", "document": ""}, None, True),
        ({"query": "query: ", "document": ""}, "query", False),
        ({"query": "", "document": ""}, None, False),  # as version 5 writes them of a model without any
    ],
)
def test_prompts_without_a_default_are_said_of_a_model(
    tmp_path: Path, prompts: dict[str, str], default: str | None, is_said: bool
) -> None:
    write_model(tmp_path, config_sentence_transformers={"prompts": prompts, "default_prompt_name": default})
    assert ("defines prompts (query) but no default" in " ".join(card_of(tmp_path).notes)) is is_said


@pytest.mark.parametrize(
    ("name", "directory", "is_said"),
    [
        ("intfloat/e5-base-v2", "model", True),
        ("mine", "multilingual-e5-small", True),
        ("mine", "models--intfloat--e5-large/snapshots/0a1b", True),
        ("intfloat/multilingual-e5-large-instruct", "model", False),  # whose queries carry an instruction
        ("e5-mistral-7b-instruct", "model", False),
        ("some-e5-base-v2-tuned", "model", False),
    ],
)
def test_a_prompt_that_no_file_names_is_said_of_the_family_whose_authors_want_it(
    tmp_path: Path, name: str, directory: str, is_said: bool
) -> None:
    write_model(tmp_path / directory)
    card = Registry({name: ModelEntry(path=str(tmp_path / directory))}).card(name)
    assert ('begin with "query: " or "passage: "' in card.unprompted) is is_said
    assert (card.unprompted in card.notes) is is_said


@pytest.mark.parametrize(
    ("name", "includes_prompt"),
    [("hkunlp/instructor-xl", False), ("models--hkunlp--instructor-base", False), ("my-instructor-v1", True)],
)
def test_no_vector_of_an_instructor_pools_over_its_prompt(
    tmp_path: Path, name: str, includes_prompt: bool
) -> None:
    for model_type, expected in (("t5", includes_prompt), ("bert", True)):  # which no INSTRUCTOR is
        write_model(tmp_path / "m", config=config_of("BertModel", model_type=model_type))
        card = Registry({name: ModelEntry(path=str(tmp_path / "m"))}).card(name)
        assert card.include_prompt is expected


def test_prompts_that_the_files_of_a_model_name_go_before_those_of_its_family(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}
    named = write_model(tmp_path / "a" / "e5-base-v2", config_sentence_transformers={"prompts": prompts})
    default = {"prompts": prompts, "default_prompt_name": "query"}
    settled = write_model(tmp_path / "b" / "e5-base-v2", config_sentence_transformers=default)
    assert "defines prompts (passage, query)" in card_of(named).unprompted
    assert card_of(settled).unprompted == ""
