"""Models in openvino answer as in torch: without their table of words, and with pairs whose texts they tell apart."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.models import DEVICE, TinyModels, read_card
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.encoder.choice import FP32
from worker.encoder.encoder import Choice, Encoder, EncoderOrder
from worker.model.network import EncoderNetwork
from worker.model.torch_encoder import TorchEncoder
from worker.openvino.converter import EmbeddedNetwork
from worker.openvino.encoder import OpenVINOEncoder
from worker.openvino.word_table import EmbeddingRows
from worker.tokens.tokenized import TOKEN_TYPE_IDS

ROW_LENGTHS = torch.tensor([[13], [9], [4]])
MASK = (torch.arange(13) < ROW_LENGTHS).long()
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
    assert torch.equal(wordless(INPUT_IDS, MASK, MASK, embeddings)[0], expected)
    # It would, too, if it still looked them up.
    assert not torch.equal(wordless(INPUT_IDS, MASK, MASK, embeddings.flip(0))[0], expected)


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


CLOSE = 1e-4
LENGTHS = (13, 7, 2)


def load(models: TinyModels, cache_dir: Path, architecture: str, backend: type) -> Encoder:
    card = read_card(models.transformer(architecture))
    order = EncoderOrder(card, DEVICE, "auto", FP32, DEVICE.num_threads, cache_dir)
    encoder: Encoder = backend(order, Choice("", ""), Choice(FP32, ""))
    return encoder


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("ModernBert", {"local_attention": 4, "global_attn_every_n_layers": 2}),
        ("Qwen3", {"sliding_window": 3, "use_sliding_window": True}),
    ],
)
def test_a_text_is_right_beside_one_that_is_longer_by_more_than_the_window(
    architecture: str, options: dict[str, Any], models: TinyModels, cache_dir: Path, tmp_path: Path
) -> None:
    """Its last padding tokens see no token, which must not reach the others."""
    directory = Path(shutil.copytree(models.transformer(architecture), tmp_path / architecture))
    config = json.loads((directory / "config.json").read_text())
    options = {**options, "layer_types": ["sliding_attention", "full_attention"]}
    (directory / "config.json").write_text(json.dumps(config | options))
    card = read_card(directory)
    order = EncoderOrder(card, DEVICE, "auto", FP32, DEVICE.num_threads, cache_dir)
    by_torch, by_openvino = (
        backend(order, Choice("", ""), Choice(FP32, "")) for backend in (TorchEncoder, OpenVINOEncoder)
    )
    batch = make_batch((40, 7, 2), is_pair=False)
    assert np.abs(encode(by_openvino, batch) - encode(by_torch, batch)).max() < CLOSE


def make_batch(lengths: tuple[int, ...] = LENGTHS, *, is_pair: bool) -> Batch:
    ids = Batch.from_ids([np.arange(5, 5 + length, dtype=np.int32) for length in lengths])
    if not is_pair:
        return ids
    types = [(np.arange(length) > length // 2).astype(np.int32) for length in lengths]
    return Batch({**ids.inputs, TOKEN_TYPE_IDS: Ragged.from_rows(types, np.int32)})


def encode(encoder: Encoder, batch: Batch) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = encoder.encode(batch).matrix
    return vectors


@pytest.mark.parametrize("architecture", ["Bert", "Electra"])
def test_pairs_agree_with_torch_and_texts_alone_do_before_and_behind_them(
    architecture: str, models: TinyModels, cache_dir: Path
) -> None:
    ours, theirs = (load(models, cache_dir, architecture, each) for each in (OpenVINOEncoder, TorchEncoder))
    assert isinstance(ours, OpenVINOEncoder)
    alone, pair = (make_batch(is_pair=is_pair) for is_pair in (False, True))
    expected_alone, expected_pair = encode(theirs, alone), encode(theirs, pair)
    assert np.abs(expected_alone - expected_pair).max() > 100 * CLOSE, "the types make a difference"
    before = encode(ours, alone)
    assert TOKEN_TYPE_IDS not in ours.network.input_names, "no input that the batch does not have"
    for batch, expected in ((pair, expected_pair), (alone, expected_alone), (pair, expected_pair)):
        assert np.abs(encode(ours, batch) - expected).max() < CLOSE
    assert np.array_equal(encode(ours, alone), before)


def test_a_network_with_one_type_of_token_refuses_pairs(models: TinyModels, cache_dir: Path) -> None:
    encoder = load(models, cache_dir, "MPNet", OpenVINOEncoder)
    with pytest.raises(ValueError, match="does not read token_type_ids"):
        encoder.encode(make_batch(is_pair=True))
    assert len(encode(encoder, make_batch(is_pair=False))) == len(LENGTHS)


def test_streams_that_encode_side_by_side_lend_their_memory_to_one_batch_at_a_time(
    models: TinyModels, cache_dir: Path
) -> None:
    """Pairs come while single texts are at work, so that the network is compiled anew among them."""
    encoder = load(models, cache_dir, "Bert", OpenVINOEncoder)
    batches = [
        make_batch(lengths, is_pair=number > 20 and is_pair)
        for number, lengths in enumerate([(30, 20), (5,), (17, 16, 15), (64,)] * 10)
        for is_pair in (False, True)
    ]
    reference = load(models, cache_dir, "Bert", OpenVINOEncoder)
    expected = [encode(reference, batch) for batch in batches]
    found: dict[int, NDArray[np.float32]] = {}
    numbers = iter(range(len(batches)))
    lock = threading.Lock()

    def serve() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            found[number] = encode(encoder, batches[number])

    threads = [threading.Thread(target=serve) for _ in range(encoder.describe().num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, vectors in found.items():
        assert np.abs(vectors - expected[number]).max() < CLOSE, number
    assert len(found) == len(batches)
