"""Tokens that a tokenizer's template lacks and its class or its code would add."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.models import packaged_model
from tests.rerankers import read_card
from vectormill.domain.errors import ModelError
from worker.model.network import check_tokenizer
from worker.tokens.tokenizer import Tokenizer

CLS, SEP = 101, 102
QWEN_CODE = ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]
BOTH = {"bos_token": "[CLS]", "eos_token": {"content": "[SEP]"}}


def write_tokenizer(directory: Path, adds: list[str], **config: Any) -> Path:
    """The packaged model with a template that adds these tokens alone, `A` being the text."""
    model = Path(shutil.copytree(packaged_model(), directory / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    single = [{"Sequence" if each == "A" else "SpecialToken": {"id": each, "type_id": 0}} for each in adds]
    special = {
        token: {"id": token, "ids": [number], "tokens": [token]}
        for token, number in (("[CLS]", CLS), ("[SEP]", SEP))
    }
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    (model / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"post_processor": template}), encoding="utf-8"
    )
    kept = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    (model / "tokenizer_config.json").write_text(json.dumps(kept | BOTH | config), encoding="utf-8")
    return model


def ends(model: Path) -> tuple[bool, bool]:
    row = Tokenizer(model, special=read_card(model).special).tokenize_whole(["some words"]).ids(0).tolist()
    return row[0] == CLS, row[-1] == SEP


@pytest.mark.parametrize(
    ("adds", "config", "expected"),
    [
        (  # e5-mistral
            ["[CLS]", "A"],
            {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True},
            (True, True),
        ),
        (["A"], {"tokenizer_class": "GemmaTokenizerFast", "add_eos_token": True}, (False, True)),
        (
            ["A"],
            {"auto_map": {"AutoTokenizer": QWEN_CODE}, "add_eos_token": True},
            (False, True),
        ),  # gte-Qwen2
        (["A", "[SEP]"], {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False}, (False, True)),
    ],
)
def test_tokens_that_the_class_adds_and_not_the_template_are_added(
    tmp_path: Path, adds: list[str], config: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    model = write_tokenizer(tmp_path, adds, **config)
    read_card(model, pooling="last_token")
    assert ends(model) == expected


@pytest.mark.parametrize(
    ("adds", "config", "pooling", "message"),
    [
        (["A"], {"auto_map": {"AutoTokenizer": ["x--own.T", None]}}, "mean", r"custom code \(own\.T\)"),
        (["A"], {"auto_map": ["own.T", None]}, "mean", r"custom code \(own\.T\)"),
        (
            ["A"],
            {"tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True},
            "mean",
            r"contradict each other.*requires \[SEP\] \(add_eos_token\)",
        ),
        (["[CLS]", "A"], {}, "last_token", "does not append an end-of-sequence token"),
        (["A"], {"auto_map": {"AutoTokenizer": QWEN_CODE}}, "last_token", "does not append"),
    ],
)
def test_a_tokenizer_whose_tokens_are_not_known_is_refused_at_submission(
    tmp_path: Path, adds: list[str], config: dict[str, Any], pooling: str, message: str
) -> None:
    model = write_tokenizer(tmp_path, adds, **config)
    with pytest.raises(ModelError, match=message):
        read_card(model, pooling=pooling)


def test_a_tokenizer_json_that_differs_from_the_class_of_transformers_is_refused_when_it_is_loaded(
    tmp_path: Path,
) -> None:
    model = write_tokenizer(tmp_path, ["[CLS]", "A", "[SEP]"], eos_token="[SEP]")
    check_tokenizer(read_card(model))
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {"1996": {"content": "the", "special": False}}
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="returns different tokens from transformers' own class"):
        check_tokenizer(read_card(model))


def test_other_poolings_need_no_final_token(tmp_path: Path) -> None:
    assert read_card(write_tokenizer(tmp_path, ["[CLS]", "A"]), pooling="cls").pooling == ("cls",)
