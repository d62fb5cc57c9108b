"""A model that several devices share gives the vectors that it gives on one: real processes, every way of sharing."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.random_embedder import SMALL, write_random_embedder
from tests.adapters import write_adapter
from tests.classifiers import STRUCTBERT, write_classifier
from tests.contract.packed_models import TOKENIZER, make_transformer
from tests.contract.rank_program import (
    ADAPTED,
    COMPRESSED,
    EXTRACTING,
    LABELED,
    NUM_LAYERS,
    REPRESENTING,
    SEQUENCES,
    SMALLEST_VOCABULARY,
    WIDE,
    attentions_of,
    batches,
    encode_with_all,
    precision_of,
    read_batches,
    read_card,
    strategies_of,
)
from tests.contract.ranks import run_ranks
from tests.models import packaged_model
from tests.representations import write_masked_language_model
from tests.rexuninlu import GOLDEN, describe, list_sequences, read_records, summarize
from vectormill.domain.task import DENSE, SPARSE
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.batching.batch import OUTPUTS
from worker.devices.device import CPU, Device, device_environment
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.encoder.outputs import BITS, POOLED, RawOutputs, read_row
from worker.placement.strategies import FULLY_SHARDED, OFFLOAD, PIPELINE, SHARED, TENSOR
from worker.runner.starter import LOOPBACK

# One of each kind: learned positions, positions behind the padding id, rotary with windows on some layers and joined
# matrices, causal with grouped heads, causal with windows on some layers, relative positions that all layers share, and
# these with a convolution behind the first layer. Gemma scales its embeddings, and looks back or both ways.
DEBERTA = ("deberta-v2", "deberta-v2, convolution")
GEMMA = ("gemma", "gemma2", "gemma3_text, both ways")
# Electra's embeddings are smaller than its hidden states.
MODELS = (
    "bert",
    "xlm-roberta",
    "electra",
    "modernbert",
    "qwen3",
    "qwen3, window",
    "mistral, window",
    *GEMMA,
    *DEBERTA,
)
# Of numbers for labels, which vary by more.
MAX_LOGIT_ERROR = 1e-4
DEVICE = Device("cpu:0", CPU, 0, (), 1, 1 << 30)

SMALL_SPLADE = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}

Answers = tuple[int, Path, list[Any]]


def save_models(directory: Path, world_size: int, wanted: set[str]) -> None:
    """Write the models that are wanted, some of which have two key heads."""
    for name in filter(wanted.__contains__, MODELS):
        make_transformer(name, num_hidden_layers=NUM_LAYERS).save_pretrained(directory / name)
        (directory / name / "tokenizer.json").write_text(TOKENIZER)
    if world_size == 2:
        save_models_of_two_ranks(directory, wanted)


def save_models_of_two_ranks(directory: Path, wanted: set[str]) -> None:
    """Write those of the wanted models by which more ranks would show nothing else."""
    for name, kind in (COMPRESSED | ADAPTED).items():
        sizes = WIDE if name in COMPRESSED else {}
        if name in wanted and "labels" in name:
            write_classifier(directory / name, kind, num_hidden_layers=NUM_LAYERS, **sizes)
        elif name in wanted:
            transformer = make_transformer(kind, num_hidden_layers=NUM_LAYERS, **sizes)
            transformer.save_pretrained(directory / name)
            (directory / name / "tokenizer.json").write_text(TOKENIZER)
            if "adapter" in name:
                write_adapter(directory / name, transformer)
    for name in wanted & LABELED.keys():
        kind = LABELED[name]
        if kind == "structbert":
            shutil.copytree(STRUCTBERT / "model", directory / name)
        else:
            write_classifier(directory / name, kind, vocab_size=SMALLEST_VOCABULARY)
    if "bge-m3" in wanted:
        write_random_embedder(SMALL, packaged_model(), directory / "bge-m3")
    if "splade" in wanted:
        write_masked_language_model(directory / "splade", "Bert", **SMALL_SPLADE)
    for name in wanted & EXTRACTING.keys():
        model = EXTRACTING[name]
        shutil.copytree(GOLDEN / model, directory / name)
        (directory / name / SEQUENCES).write_bytes(pickle.dumps(list_sequences(model)))


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"]
)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The number of ranks, the directory of the models, and what every rank has answered."""
    world_size: int = request.param
    directory = tmp_path_factory.mktemp("shared")
    cases = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    save_models(directory, world_size, {str(case["name"]) for case in cases if "shared" in case})
    return world_size, directory, ask_ranks(directory, world_size, SHARED)


def ask_ranks(directory: Path, world_size: int, strategies: tuple[str, ...]) -> list[Any]:
    environment = device_environment(DEVICE, 1) | LOOPBACK
    calls = [(number, world_size, directory, strategies) for number in range(world_size)]
    run_ranks(encode_with_all, calls, environment)
    return [np.load(directory / f"{number}.npz") for number in range(world_size)]


def whole(directory: Path, name: str) -> Encoder:
    card = read_card(directory / name)
    return load_encoder(EncoderOrder(card, DEVICE, "torch", precision_of(name), 1, directory))


def join_answers(answers: list[Any], name: str) -> Ragged:
    """The ranks' rows, one behind the other; a rank may have none."""
    lengths = np.concatenate([each[f"{name}|lengths"] for each in answers])
    values = np.concatenate([each[name] for each in answers])
    return Ragged(values, np.concatenate(([0], np.cumsum(lengths))))


@pytest.mark.parametrize(
    ("name", "strategy", "attention"),
    [
        (name, strategy, attention)
        for name in (*MODELS, *COMPRESSED, *ADAPTED, *LABELED)
        for strategy in strategies_of(name)
        for attention in attentions_of(name)
    ],
)
def test_a_shared_model_gives_the_vectors_of_a_whole_one(
    shared: Answers, name: str, strategy: str, attention: str
) -> None:
    world_size, directory, answers = shared
    if world_size > 2 and not (directory / name).exists():
        pytest.skip("what does not depend on the number of ranks is shared among two of them only")
    encoder = whole(directory, name)
    for place, batch in enumerate(batches()):
        expected = encoder.encode(batch).matrix
        found = join_answers(answers, f"{name}|{strategy}|{attention}|{place}").matrix
        assert found.shape == expected.shape
        if "labels" in name:
            assert np.abs(found - expected).max() < MAX_LOGIT_ERROR
            assert len(batch) == 1 or np.ptp(expected, axis=0).min() > 100 * MAX_LOGIT_ERROR
        else:
            assert find_cosines(found, expected).min() >= 0.99999


def test_layers_in_main_memory_give_the_vectors_of_a_whole_model(tmp_path: Path) -> None:
    names = ("bert", "qwen3, window", "deberta-v2, convolution", *COMPRESSED)
    save_models(tmp_path, 2, set(names))
    shared = (1, tmp_path, ask_ranks(tmp_path, 1, (OFFLOAD,)))
    for name in names:
        for attention in attentions_of(name):
            test_a_shared_model_gives_the_vectors_of_a_whole_one(shared, name, OFFLOAD, attention)


def test_eight_ranks_give_the_vectors_of_a_whole_model_also_where_they_outnumber_the_key_heads(
    tmp_path: Path,
) -> None:
    more: dict[str, dict[str, int]] = {"bert": {}, "qwen3": {"num_key_value_heads": 2, "head_dim": 8}}
    for name, sizes in more.items():
        transformer = make_transformer(name, num_hidden_layers=8, num_attention_heads=8, **sizes)
        transformer.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(TOKENIZER)
    shared = (8, tmp_path, ask_ranks(tmp_path, 8, SHARED))
    for name in more:
        for strategy in SHARED:
            for attention in attentions_of(name):
                test_a_shared_model_gives_the_vectors_of_a_whole_one(shared, name, strategy, attention)


def find_cosines(found: NDArray[np.float32], expected: NDArray[np.float32]) -> NDArray[np.float32]:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    cosines: NDArray[np.float32] = (found * expected).sum(axis=1) / norms
    return cosines


@pytest.mark.parametrize("strategy", SHARED)
@pytest.mark.parametrize("name", REPRESENTING)
def test_a_shared_model_gives_the_outputs_and_passages_of_a_whole_one(
    shared: Answers, name: str, strategy: str
) -> None:
    world_size, directory, answers = shared
    if world_size > 2 and not (directory / name).exists():
        pytest.skip("its layers are too few for four stages")
    encoder, card = whole(directory, name), read_card(directory / name)
    for place, batch in enumerate(read_batches(directory / name)):
        expected = encoder.encode(batch)
        found = join_answers(answers, f"{name}|{strategy}|padded|{place}")
        assert len(found) == len(expected) == len(batch)
        for number, asked in enumerate(batch.inputs[OUTPUTS].covered.tolist()):
            rows = [rows.row(number) for rows in (found, expected)]
            if asked & BITS[POOLED]:
                size = 2 * 4 * card.dimension  # of the two passages
                passages = [row[-size:].view(np.float32).reshape(2, -1) for row in rows]
                assert find_cosines(*passages).min() >= 0.99999
                rows = [row[:-size] for row in rows]
            num_tokens = int(batch.lengths[number])
            ours, theirs = (
                read_row(row, (asked or BITS[DENSE]) & ~BITS[POOLED], num_tokens, card) for row in rows
            )
            assert not theirs.dense.size or find_cosines(ours.dense[None], theirs.dense[None]) >= 0.99999
            np.testing.assert_allclose(ours.vectors, theirs.vectors, atol=2e-3)
            np.testing.assert_allclose(weigh(ours, card), weigh(theirs, card), atol=1e-4)
            assert not asked & BITS[SPARSE] or theirs.weights.max() > 0.01


def weigh(outputs: RawOutputs, card: ModelCard) -> NDArray[np.float32]:
    """Return the weights of tokens, or those of all words, of which some may be zero on one side only."""
    if not len(outputs.words):
        return outputs.weights
    weights = np.zeros(card.sparse_dimensions, np.float32)
    weights[outputs.words] = outputs.weights
    return weights


@pytest.mark.parametrize("strategy", [FULLY_SHARDED, PIPELINE])
@pytest.mark.parametrize("name", EXTRACTING)
def test_a_shared_extraction_finds_the_cells_and_records_of_a_whole_one(
    shared: Answers, name: str, strategy: str
) -> None:
    """Of all that the golden cases ask, level by level; their records are the reference's."""
    world_size, directory, answers = shared
    if world_size > 2 and not (directory / name).exists():
        pytest.skip("its layers are too few for four stages")
    encoder, rows = whole(directory, name), []
    for place, batch in enumerate(read_batches(directory / name)):
        expected = encoder.encode(batch)
        found = join_answers(answers, f"{name}|{strategy}|padded|{place}")
        np.testing.assert_array_equal(found.lengths, expected.lengths)
        np.testing.assert_allclose(found.covered, expected.covered, atol=MAX_LOGIT_ERROR)
        rows.append(found)
    num_found = 0
    for case, records in read_records(EXTRACTING[name], Ragged.join(rows)):
        assert describe(records) == summarize(case["output"]), case["id"]
        num_found += case["output"]["count"]
    assert num_found > 10


@pytest.mark.parametrize("strategy", [FULLY_SHARDED, PIPELINE])
@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_together_read_the_weights_once(shared: Answers, name: str, strategy: str) -> None:
    world_size, _, answers = shared
    read = sum(int(answers[number][f"{name}|{strategy}|bytes"]) for number in range(world_size))
    transformer = make_transformer(name, num_hidden_layers=NUM_LAYERS)
    sizes = {
        key: value.nbytes for key, value in transformer.named_parameters() if not key.startswith("pooler")
    }
    # What all layers read, every stage has.
    shared = sum(
        size for key, size in sizes.items() if key.startswith(("encoder.rel_embeddings", "encoder.LayerNorm"))
    )
    copies = 0 if strategy == FULLY_SHARDED else world_size - 1
    assert read == sum(sizes.values()) + copies * shared


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DEBERTA])
def test_a_rank_of_a_tensor_parallel_model_reads_its_part_of_every_layer(shared: Answers, name: str) -> None:
    world_size, _, answers = shared
    transformer = make_transformer(name, num_hidden_layers=NUM_LAYERS)
    key_heads = getattr(transformer.config, "num_key_value_heads", world_size)
    matrices = {
        key: value.nbytes
        * (1 - 1 / (min(key_heads, world_size) if "k_proj" in key or "v_proj" in key else world_size))
        for key, value in transformer.named_parameters()
        if value.ndim == 2 and any(part.isdigit() for part in key.split("."))
    }
    whole_bytes = sum(
        value.nbytes for key, value in transformer.named_parameters() if not key.startswith("pooler")
    )
    saved = sum(matrices.values())
    for number in range(world_size):
        assert int(answers[number][f"{name}|{TENSOR}|bytes"]) <= whole_bytes - saved
