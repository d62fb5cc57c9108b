"""A model with an adapter of a task gives what it gives after peft merged that adapter into its weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.adapters import ADAPTER, DATA, IDS, write_adapted, write_config
from tests.rerankers import read_card
from vectormill.domain.errors import ModelError, UnsupportedModel
from worker.model.network import load_transformer


@torch.inference_mode()
def states_of(transformer: Any) -> list[Any]:
    return [transformer(input_ids=torch.tensor([ids]))[0][0].numpy() for ids in IDS]


def test_an_adapter_is_merged_as_peft_merges_it(tmp_path: Path) -> None:
    directory = write_adapted(tmp_path / "jina-embeddings-v3-hf")
    card = read_card(directory, adapter=ADAPTER)
    assert (card.pooling, card.revision.endswith(f"+{ADAPTER}")) == (("mean",), True)
    assert card.notes[0] == "The adapter retrieval_query is merged into its weights."
    assert "Represent the query for retrieving evidence documents: " in card.unprompted
    golden = np.load(DATA / "states.npz")
    found = states_of(load_transformer(card, torch.float32))
    for number, states in enumerate(found):
        assert np.abs(states - golden[f"arr_{number}"]).max() < 1e-5
    bare = states_of(load_transformer(read_card(directory, pooling="mean"), torch.float32))
    assert np.abs(bare[0] - found[0]).max() > 0.1


def test_an_adapter_that_is_more_than_lora_or_of_another_model_is_refused(tmp_path: Path) -> None:
    directory = write_adapted(tmp_path)
    with pytest.raises(UnsupportedModel, match="and none is chosen"):
        read_card(directory)
    with pytest.raises(UnsupportedModel, match=r"no adapter 'separation'; it has retrieval_query\."):
        read_card(directory, adapter="separation")
    revision = read_card(directory, adapter=ADAPTER).revision
    write_config(directory, lora_alpha=4)
    assert read_card(directory, adapter=ADAPTER).revision != revision
    write_config(directory, use_dora=True)
    with pytest.raises(UnsupportedModel, match=r"not a plain LoRA \(use_dora\)"):
        read_card(directory, adapter=ADAPTER)
    write_config(directory, use_dora=False)
    path = directory / ADAPTER / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.9"): each for name, each in load_file(path).items()}, path)
    with pytest.raises(ModelError, match=r"does not fit its weights at 'layers\.9"):
        load_transformer(read_card(directory, adapter=ADAPTER), torch.float32)
