"""A network that is given the embeddings of its words answers as the one that looks them up, and its table has them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models import TinyModels, read_card
from worker.model.network import EncoderNetwork
from worker.openvino.converter import EmbeddedNetwork
from worker.openvino.word_table import EmbeddingRows

LENGTHS = torch.tensor([[13], [9], [4]])
MASK = (torch.arange(13) < LENGTHS).long()
INPUT_IDS = torch.arange(5, 18) * MASK


def load_network(models: TinyModels, architecture: str) -> EncoderNetwork:
    return EncoderNetwork(read_card(models.transformer(architecture)), torch.float32)


@pytest.mark.parametrize(
    "architecture",
    [
        "Bert",
        "Roberta",  # positions are made of ids
        "MPNet",
        "DistilBert",
        "Albert",
        "ModernBert",
        "Qwen3",
        "Gemma3Text",  # scales its embeddings
    ],
)
@torch.inference_mode()
def test_it_answers_as_the_whole_network(architecture: str, models: TinyModels, tmp_path: Path) -> None:
    network = load_network(models, architecture)
    expected = network(INPUT_IDS, MASK, MASK)
    wordless = EmbeddedNetwork(network)
    dim = wordless.write_table(tmp_path / "words.bin", "fp32")
    embeddings = torch.from_numpy(EmbeddingRows(tmp_path / "words.bin", dim).read(INPUT_IDS.numpy()))
    assert torch.equal(embeddings, wordless.embed(INPUT_IDS))
    assert torch.equal(wordless(INPUT_IDS, MASK, MASK, embeddings), expected)
    # It would, too, if it still looked them up.
    assert not torch.equal(wordless(INPUT_IDS, MASK, MASK, embeddings.flip(0)), expected)


@torch.inference_mode()
def test_no_parameter_of_it_is_the_table(models: TinyModels) -> None:
    network = load_network(models, "Bert")
    num_words = 30522
    assert num_words in {len(parameter) for parameter in network.parameters()}
    assert num_words not in {len(parameter) for parameter in EmbeddedNetwork(network).parameters()}


@torch.inference_mode()
def test_compressed_weights_leave_a_rounded_table(models: TinyModels, tmp_path: Path) -> None:
    wordless = EmbeddedNetwork(load_network(models, "Bert"))
    dim = wordless.write_table(tmp_path / "words.bin", "int8")
    input_ids = torch.arange(5, 18)
    rounded = EmbeddingRows(tmp_path / "words.bin", dim).read(input_ids.numpy())
    exact = wordless.embed(input_ids).numpy()
    steps = np.abs(exact).max(axis=-1, keepdims=True) / 127
    assert (np.abs(rounded - exact) <= 0.501 * steps).all()
    assert np.abs(rounded / steps - np.rint(rounded / steps)).max() < 0.01
    assert np.abs(exact / steps - np.rint(exact / steps)).max() > 0.4
