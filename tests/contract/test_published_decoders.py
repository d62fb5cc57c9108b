"""Decoders that embed texts agree with what their authors' code computes, in the layouts of their repositories.

The references are transformers' own models in eager fp32, one text at a time, with ids and masks written out here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tests.models import BACKENDS, TEXTS, encode, packaged_model, read_card, smallest_cosine
from tests.unit.deployment.test_registry import modules
from tests.unit.tokens.test_special_tokens import CLS, QWEN_CODE, SEP, write_tokenizer
from vectormill.domain.errors import UnsupportedModel

SIZES: Final = {
    "vocab_size": 30522,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MAX_TOKENS: Final = 64
PROMPT: Final = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
)
LLAMA: Final = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True}
CODE: Final = {
    "AutoModel": "modeling_qwen.Qwen2Model",
    "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
}
GTE: Final = {"auto_map": {"AutoTokenizer": QWEN_CODE}, "add_eos_token": True}
# A layout names the class that was saved, settings of config.json, the tokens of the tokenizer's template, and
# settings of tokenizer_config.json.
LAYOUTS: Final[Mapping[str, tuple[str, dict[str, Any], list[str], dict[str, Any]]]] = {
    "e5-mistral, SFR-Embedding-Mistral": ("MistralModel", {"sliding_window": 9}, ["[CLS]", "A"], LLAMA),
    "SFR-Embedding-2_R, Linq-Embed-Mistral": (
        "MistralModel",
        {"sliding_window": None},
        ["[CLS]", "A"],
        LLAMA,
    ),
    # Its code, that of transformers 4.41 but for the mask, lets all tokens attend to each other.
    "gte-Qwen2": ("Qwen2ForCausalLM", {"is_causal": False, "auto_map": CODE}, ["A"], GTE),
}


def write_layout(directory: Path, layout: str) -> Path:
    """Write a model of random weights as its authors publish it."""
    architecture, settings, adds, tokenizer = LAYOUTS[layout]
    model = write_tokenizer(directory, adds, **tokenizer, model_max_length=512)
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    written = kind(kind.config_class(**SIZES, **{"sliding_window": None, **settings}))
    for parameter in written.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    written.save_pretrained(model)
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | settings))
    files: dict[str, Any] = {
        "modules": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config": {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True},
        "sentence_bert_config": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
        "config_sentence_transformers": {"prompts": {"query": PROMPT}, "default_prompt_name": None},
    }
    for name, content in files.items():
        (model / f"{name}.json").parent.mkdir(exist_ok=True)
        (model / f"{name}.json").write_text(json.dumps(content))
    return model


@torch.inference_mode()
def make_reference(directory: Path, layout: str, prompt: str) -> NDArray[np.float32]:
    """Return the last token's state of each text, which follows its words."""
    architecture, settings, adds, _ = LAYOUTS[layout]
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Model"))
    config = kind.config_class.from_pretrained(directory, is_causal=True)
    network = kind.from_pretrained(directory, config=config, attn_implementation="eager").eval()
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(packaged_model() / "tokenizer.json"))
    words.backend_tokenizer.no_truncation()
    rows = []
    for text in TEXTS:
        ids = words(prompt + text, add_special_tokens=False)["input_ids"]
        ids = [*[CLS for each in adds if each == "[CLS]"], *ids]
        ids = [*ids[: MAX_TOKENS - 1], SEP]
        sees_all = settings.get("is_causal") is False
        mask = torch.zeros(1, 1, len(ids), len(ids)) if sees_all else None
        rows.append(network(input_ids=torch.tensor([ids]), attention_mask=mask)[0][0, -1].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_agrees_with_its_authors_code(
    layout: str, backend: str, tmp_path: Path, cache_dir: Path
) -> None:
    directory = write_layout(tmp_path, layout)
    for name, prompt in ((None, ""), ("query", PROMPT)):
        expected = make_reference(directory, layout, prompt)
        together = encode(directory, backend, cache_dir, prompt=name)
        assert smallest_cosine(together, expected) >= 0.9999
        alone = encode(directory, backend, cache_dir, prompt=name, groups=[[i] for i in range(len(TEXTS))])
        assert smallest_cosine(alone, together) >= 0.9999


def test_a_decoder_with_code_of_its_own_must_say_whether_it_reads_from_left_to_right(tmp_path: Path) -> None:
    directory = write_layout(tmp_path, "gte-Qwen2")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["is_causal"]
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"modeling_qwen\.Qwen2Model.*set is_causal"):
        read_card(directory)
    path.write_text(json.dumps(config | {"is_causal": True}))
    assert read_card(directory).pooling == ("last_token",)
