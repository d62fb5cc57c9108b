"""A GLiNER finds the spans that its authors' package finds, in windows of long texts, too."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gliner_models import GOLDEN, KNOWN
from tests.models import DEVICE
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import InvalidOption, ModelError
from vectormill.jobs.item import ItemFailure
from vectormill.models.model_card import GLINER, ModelCard
from vectormill.models.registry import Registry, make_spec
from vectormill.settings import ModelEntry
from worker.batching.batch import WORD_MARKS, Batch
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.placement.footprint import count_weights
from worker.tasks.extract.gliner import FIRST_OF_WORD, WORD, Gliner
from worker.tasks.extract.model.gliner import GlinerNetwork, count_turns, find_places
from worker.tasks.extract.model.head import pad_arrays
from worker.tokens.tokenized import INPUT_IDS

SCHEMA = dict.fromkeys(KNOWN["labels"])
MODELS = pytest.mark.parametrize("name", ["deberta", "bert"])


def read_card(directory: Path) -> ModelCard:
    return Registry({"m": ModelEntry(path=str(directory))}).card("m", weights=True)


def load(card: ModelCard, tmp_path: Path, precision: str = "auto", **options: Any) -> Encoder:
    return load_encoder(EncoderOrder(card, DEVICE, "auto", precision, 1, tmp_path, **options))


def extract(card: ModelCard, encoder: Encoder, texts: list[str], schema: Any = SCHEMA) -> list[Any]:
    """Return for each text [start, end, label, confidence] of each span, or its failure."""
    course = Gliner(card).begin(schema, texts, with_confidences=True)
    prompts = course.start()
    if prompts is not None:
        assert course.take(encoder.encode(Batch(prompts.inputs))) is None
    answers: list[Any] = []
    for text, records in zip(texts, course.finish(), strict=True):
        if isinstance(records, ItemFailure):
            answers.append(records)
            continue
        assert all(text[slice(*step["offset"])] == step["span"] for (step,) in records)
        answers.append([[*step["offset"], step["type"], step["confidence"]] for (step,) in records])
    return answers


def are_alike(found: list[Any], expected: list[Any]) -> bool:
    places = [[step[:3] for step in answer] for answer in found]
    assert places == [[step[:3] for step in answer] for answer in expected]
    one, other = ([step[3] for answer in answers for step in answer] for answers in (found, expected))
    return bool(np.allclose(one, other, atol=1e-3))


@MODELS
def test_the_spans_are_those_of_the_package_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    """Flat spans of a probability above a half (tests/data/gliner/make.py)."""
    card = read_card(GOLDEN / name)
    encoder, expected = load(card, tmp_path), KNOWN["models"][name]["answers"]
    assert any(expected)
    assert are_alike(extract(card, encoder, KNOWN["texts"]), expected)
    alone = [extract(card, encoder, [text])[0] for text in KNOWN["texts"]]
    assert are_alike(alone, expected)


@MODELS
@pytest.mark.skipif(not DEVICE.has_bf16, reason="this processor would emulate bf16, which is refused")
def test_an_encoder_in_16_bits_finds_the_spans_that_are_certain(name: str, tmp_path: Path) -> None:
    """Found: confidences differ by at most 0.024, and one span more, of a confidence of 0.5025."""
    card = read_card(GOLDEN / name)
    both = (extract(card, load(card, tmp_path, precision), KNOWN["texts"]) for precision in ("fp32", "bf16"))
    exact, near = (
        {(number, *step[:3]): step[3] for number, answer in enumerate(answers) for step in answer}
        for answers in both
    )
    assert all(abs(exact.get(key, 0.5) - near.get(key, 0.5)) < 0.05 for key in exact.keys() | near.keys())


@MODELS
def test_the_logits_are_those_of_the_package(name: str) -> None:
    card = read_card(GOLDEN / name)
    prompts = Gliner(card).begin(SCHEMA, KNOWN["texts"], with_confidences=False).start()
    assert prompts is not None
    network = GlinerNetwork(card, torch.float32)
    batch = Batch(prompts.inputs)
    arrays = pad_arrays(batch, network.pad_token_id) | find_places(batch)
    with torch.inference_mode():
        found = network({name: torch.from_numpy(array) for name, array in arrays.items()}, count_turns(batch))
    for logits, rows in zip(found, KNOWN["models"][name]["logits"], strict=True):
        expected = np.array(rows)
        num_words, num_widths, _ = expected.shape
        ends = np.arange(num_words)[:, None] + np.arange(num_widths)
        assert np.abs(logits[:num_words].numpy() - expected)[ends < num_words].max() < 1e-4
        assert (logits[num_words:] < 0).all()


def test_a_long_text_is_read_in_windows_that_share_more_words_than_a_span_has(tmp_path: Path) -> None:
    card = read_card(GOLDEN / "deberta")
    text = " ".join(KNOWN["texts"]) * 4
    course = Gliner(card).begin(SCHEMA, [text, KNOWN["texts"][0]], with_confidences=False)
    prompts = course.start()
    assert prompts is not None
    assert prompts.texts.tolist() == [0] * (len(prompts) - 1) + [1]
    marks = [prompts.inputs[WORD_MARKS].row(number) for number in range(len(prompts) - 1)]
    counts = [int((each == FIRST_OF_WORD).sum()) for each in marks]
    assert max(counts) == 24
    num_shared = sum(counts) - len(WORD.findall(text))
    assert num_shared == 12 * (len(counts) - 1), (
        "half of a window, which is more than the four words of a span"
    )
    (found, alone) = extract(card, load(card, tmp_path), [text, KNOWN["texts"][0]])
    assert all(before[1] <= after[0] for before, after in pairwise(found)), "spans do not overlap"
    assert alone == extract(card, load(card, tmp_path), [KNOWN["texts"][0]])[0]
    assert found[-1][0] > len(text) * 3 / 4


def test_labels_that_leave_no_room_for_words_fail_each_text_with_a_reason(tmp_path: Path) -> None:
    card = read_card(GOLDEN / "bert")
    many = dict.fromkeys(f"label {number}" for number in range(60))
    for schema, reason in ((many, "use fewer"), ({"a <<ENT>> b": None}, "reads as structure")):
        (failure,) = extract(card, load(card, tmp_path), ["some text"], schema)
        assert failure.code == "too_many_tokens"
        assert reason in failure.detail


def test_a_word_of_more_tokens_than_a_window_is_cut_and_told(tmp_path: Path) -> None:
    card = read_card(GOLDEN / "deberta")
    course = Gliner(card).begin(SCHEMA, ["a", "tests" * 300], with_confidences=False)
    prompts = course.start()
    assert prompts is not None
    assert prompts.inputs[INPUT_IDS].lengths.max() <= card.max_tokens
    assert [number > 0 for number in course.num_left_out] == [False, True]


def test_a_nested_schema_is_refused_with_the_name_of_the_type() -> None:
    card = read_card(GOLDEN / "bert")
    with pytest.raises(InvalidOption, match=r"schema\.company.*on one level"):
        make_spec(card, EncodingOptions(extract_schema='{"company": {"founder": null}, "person": null}'))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"span_mode": "token_level"}, "span_mode 'token_level', only 'markerV0' is supported"),
        ({"labels_encoder": "bge"}, "labels_encoder 'bge', which is not supported"),
        ({"encoder_config": None}, "lacks encoder_config.*save_pretrained"),
        ({"encoder_config": {"model_type": "qwen3"}}, "encoder of the architecture 'qwen3', which is not"),
    ],
)
def test_what_is_no_span_model_of_one_encoder_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    directory = shutil.copytree(GOLDEN / "bert", tmp_path / "model")
    path = directory / "gliner_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=reason):
        read_card(directory)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    directory = shutil.copytree(GOLDEN / "bert", tmp_path / "model")
    whole = load_file(directory / "model.safetensors")
    for lacking in ("prompt_rep_layer.0.bias", "token_rep_layer.bert_layer.model.embeddings.LayerNorm.bias"):
        rest = {name: each for name, each in whole.items() if name != lacking}
        save_file(rest, directory / "model.safetensors")
        with pytest.raises(ModelError, match=lacking.removeprefix("token_rep_layer.bert_layer.model.")):
            load(read_card(directory), tmp_path)


def test_packed_attention_is_refused_and_the_layers_are_those_of_the_encoder(tmp_path: Path) -> None:
    card = read_card(GOLDEN / "deberta")
    assert card.extractor == GLINER
    with pytest.raises(ModelError, match="reads words and labels out of padded batches"):
        load(card, tmp_path, attention="packed")
    shape = card.find_shape()
    assert (shape.num_layers, shape.hidden_size, shape.num_relative_positions) == (2, 32, 32)
    weights = count_weights(shape, "fp32", 4)
    assert len(weights.layer_bytes) == 2
    assert weights.total_bytes == 4 * (card.num_parameters or 0)
