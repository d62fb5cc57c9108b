"""A model is outlined by its configuration alone as it is by the headers of its weights."""

import shutil
from pathlib import Path

import pytest

from tests.models import TinyModels
from tests.rerankers import read_card
from vectormill.models.layouts import read_model_card
from worker.plan import find_shape


@pytest.mark.parametrize(
    "architecture",
    ["Bert", "XLMRoberta", "ModernBert", "Qwen3", "Mistral", "DistilBert", "MPNet", "DebertaV2"],
)
def test_a_configuration_alone_gives_the_shape_that_the_weights_have(
    architecture: str, models: TinyModels, tmp_path: Path
) -> None:
    whole = models.transformer(architecture)
    shutil.copy(whole / "config.json", tmp_path)
    read = find_shape(read_card(whole, pooling="mean"))
    card = read_model_card("outlined", tmp_path, needs_weights=False, must_encode=False)
    assert not card.shape.tensors
    outlined = find_shape(card)
    assert {(each.name, each.shape, each.layer) for each in outlined.tensors} == {
        (each.name, each.shape, each.layer) for each in read.tensors
    }
    for size in ("num_layers", "num_key_value_heads", "intermediate_size", "is_gated", "has_joined_gate"):
        assert getattr(outlined, size) == getattr(read, size), size
