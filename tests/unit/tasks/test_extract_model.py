"""An extractor's network: its numbers beside the reference's, its loading, and the cells of its logits."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import read_card
from tests.rexuninlu import (
    CPU,
    GOLDEN,
    MODELS,
    by_network,
    drive,
    extract_of,
    find_case,
    join_inputs,
    list_cases,
    load,
    load_tokenizer,
    read_arrays,
    read_head,
)
from vectormill.domain.errors import ModelError
from vectormill.domain.schema import MAX_WINDOW_TOKENS, Schema
from worker.batching.batch import Batch
from worker.devices.device import CUDA, Device
from worker.encoder.backends import load_encoder
from worker.encoder.choice import choose_extraction_precision
from worker.encoder.encoder import EncoderOrder
from worker.encoder.padding import pad_batch
from worker.tasks.extract.extraction import Extraction
from worker.tasks.extract.model.config import parse_config, read_config, tabulate_distances
from worker.tasks.extract.model.head import find_places, find_wanted, pad_inputs
from worker.tasks.extract.model.network import RexNetwork, load_network
from worker.tasks.extract.prompts import PromptTokenizer, Window
from worker.tasks.extract.records import (
    NonFiniteLogits,
    TooManyCells,
    find_candidates,
    find_type_places,
    read_cells,
)

MAX_LOGIT_ERROR = 1e-4
MAX_HIDDEN_ERROR = 1e-5
SHORT = 80  # tokens, of which most cases have fewer


@cache
def list_calls(model: str) -> tuple[Batch, list[tuple[str, int]]]:
    """All calls of the first level of the model's natural cases: their sequences, and of each its key and step."""
    levels, names = [], []
    for case in list_cases("natural", model):
        prompts = extract_of(case).start()
        if prompts is not None:
            levels.append(prompts)
            names += [(call["key"], call["logits_step"]) for call in case["calls"][: len(prompts)]]
    return join_inputs(levels), names


def cut_batches(rows: list[int], size: int) -> Iterator[list[int]]:
    """All rows in batches of so many, in any order."""
    random.Random(size).shuffle(rows)
    return (rows[start : start + size] for start in range(0, len(rows), size))


def compute(net: RexNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits [n, length, length] and hidden states [n, length, hidden]."""
    padded = pad_batch(batch, 0)
    tokens = {name: torch.from_numpy(values) for name, values in padded.tokens.items()}
    is_token = torch.from_numpy(padded.attention_mask).bool()
    with torch.inference_mode():
        return net(**tokens, is_token=is_token), net.encode(**tokens, is_token=is_token)


def find_errors(
    net: RexNetwork, model: str, size: int, *, longest: int = MAX_WINDOW_TOKENS
) -> tuple[float, float]:
    """The greatest errors of logits and hidden states over all calls of the first level, in batches of this size."""
    batch, names = list_calls(model)
    errors = [(0.0, 0.0)]
    for rows in cut_batches(np.flatnonzero(batch.lengths <= longest).tolist(), size):
        logits, hidden = compute(net, batch.take(np.array(rows)))
        for number, row in enumerate(rows):
            key, step = names[row]
            length = int(batch.lengths[row])
            errors.append(
                (
                    find_error(logits[number, :length:step, :length:step], f"{key}/logits"),
                    find_error(hidden[number, :length:step], f"{key}/hidden"),
                )
            )
    return max(error for error, _ in errors), max(error for _, error in errors)


def find_error(values: Tensor, name: str) -> float:
    return float((values - torch.from_numpy(read_arrays()[name])).abs().max())


@pytest.mark.parametrize("size", [3, 1, 8])
@pytest.mark.parametrize("model", MODELS)
def test_a_sequence_has_the_references_numbers_alone_and_in_any_batch(model: str, size: int) -> None:
    logits, hidden = find_errors(load(model), model, size)
    assert logits <= MAX_LOGIT_ERROR
    assert hidden <= MAX_HIDDEN_ERROR


@pytest.mark.parametrize("model", MODELS)
def test_later_levels_have_the_references_numbers(model: str) -> None:
    """Prompts with several paths, which do not see one another."""
    num_compared = 0
    for case in list_cases("natural", model):
        if case["num_calls"] != len(case["calls"]) or len(case["levels"]) < 2:
            continue
        sequences = join_inputs(drive(extract_of(case), by_network(load(model))))
        for number, call in enumerate(case["calls"]):
            logits, _ = compute(load(model), sequences.part(number, number + 1))
            step = call["logits_step"]
            assert find_error(logits[0, ::step, ::step], f"{call['key']}/logits") <= MAX_LOGIT_ERROR
            num_compared += 1
    assert num_compared > 10


def test_signs_of_long_texts_are_the_references_wherever_they_are_certain() -> None:
    for model in MODELS:
        case = next(case for case in list_cases(model=model) if case["id"].endswith("long_two_windows"))
        sequences = join_inputs(drive(extract_of(case), by_network(load(model))))
        for number, call in enumerate(case["calls"]):
            logits = compute(load(model), sequences.part(number, number + 1))[0][0].numpy()
            bits = read_arrays()[f"{call['key']}/positive_bits"]
            is_positive = np.unpackbits(bits, axis=1, count=len(logits)).astype(bool)
            is_certain = np.abs(logits) > MAX_LOGIT_ERROR
            assert ((logits > 0) == is_positive)[is_certain].all()
            assert is_certain.mean() > 0.999


# What others do, and what stock code does: each is seen by the same comparison that the network passes.


ROTATE, INDEX = RexNetwork._rotate, RexNetwork._index_distances


def test_heads_that_take_turns_compute_the_same() -> None:
    """Where not all biases fit at once."""
    loaded = load_network(GOLDEN / "model", torch.float32, CPU, bias_bytes=1)
    assert find_errors(loaded, "model", size=8, longest=SHORT)[0] <= MAX_LOGIT_ERROR


@pytest.mark.parametrize("model", MODELS)
def test_sixteen_bits_in_the_encoder_and_a_head_in_fp32_stay_near(model: str) -> None:
    """Logits reach 22; their signs decide. Found: errors of 0.25 at most, 0.05 on average, and F1 of 0.988."""
    rounded = load_network(GOLDEN / model, torch.bfloat16, CPU)
    assert {part.dtype for part in (rounded.ffnq.weight, rounded.ffnk.weight)} == {torch.float32}
    assert rounded.plm["encoder"].rel_embeddings.weight.dtype == torch.bfloat16
    batch, _ = list_calls(model)
    num_both = num_either = 0
    for rows in cut_batches(np.flatnonzero(batch.lengths <= SHORT).tolist(), 8):
        part = batch.take(np.array(rows))
        (exact, states), (near, near_states) = (compute(each, part) for each in (load(model), rounded))
        inputs = pad_inputs(part, CPU)
        is_token = inputs.is_token
        is_inside = is_token[:, :, None] & is_token[:, None, :]
        assert (near - exact)[is_inside].abs().max() < 0.4
        cosines = torch.cosine_similarity(near_states.float(), states, dim=-1)
        assert cosines[is_token].min() > 0.9995
        places = find_places(inputs.tokens["token_type_ids"], inputs.tokens["type_segments"], is_token)
        wanted, found = (find_wanted(each, *places, inputs.is_blank) for each in (exact, near))
        num_both += int((wanted & found).sum())
        num_either += int(wanted.sum() + found.sum())
    assert 2 * num_both / num_either > 0.97


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        (Device("cuda:0", CUDA, 0, (), 1, 1 << 30, frozenset({"sm_80"})), "bf16"),
        (Device("cuda:0", CUDA, 0, (), 1, 1 << 30, frozenset({"sm_75"})), "fp32"),  # emulates bf16
        (Device("cpu:0", "cpu", 0, (), 1, 1 << 30, frozenset({"amx_bf16"})), "fp32"),  # as ever
    ],
)
def test_an_extraction_has_16_bits_on_a_gpu_that_computes_them(device: Device, precision: str) -> None:
    assert choose_extraction_precision("auto", device).value == precision
    assert choose_extraction_precision("fp32", device).value == "fp32"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "model", tmp_path / "model"))


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


@pytest.mark.parametrize("name", MODELS)
def test_pickled_weights_are_the_same_network(name: str, tmp_path: Path) -> None:
    """The published model has no other."""
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    loaded = load_network(folder, torch.float32, CPU).state_dict()
    assert loaded.keys() == load(name).state_dict().keys()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in load(name).state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("ffnq.bias"), "missing: ffnq.bias"),
        (lambda tensors: tensors.pop("rotary_emb.freqs"), "missing: rotary_emb.freqs"),
        (lambda tensors: tensors.update({"plm.x": torch.zeros(1)}), "unexpected: plm.x"),
        (lambda tensors: tensors.update({"ffnk.bias": torch.zeros(3)}), "wrong shape: ffnk.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], None], words: str, model: Path
) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load_network(model, torch.float32, CPU)


def test_numbers_of_positions_that_older_files_keep_are_passed_over(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["plm.embeddings.position_ids"] = torch.arange(512)[None]
    save_file(tensors, model / "model.safetensors")
    load_network(model, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sliding_window": 64}, "unknown settings: sliding_window"),
        ({"model_type": "deberta"}, "model_type is 'deberta'"),
        ({"relative_attention": False}, "relative_attention is False"),
        ({"pos_att_type": ["p2p"]}, "pos_att_type is"),
        ({"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is 'batch_norm'"),
        ({"z_steps": 2}, "z_steps is 2"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"conv_act": "mish"}, "conv_act is 'mish'"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ({"attention_head_size": 7}, "attention_head_size is 7"),
        ({"hidden_size": "32"}, "hidden_size must be an integer; got '32'"),
        ({"vocab_size": "absent"}, "vocab_size must be an integer; got None"),
    ],
)
def test_switches_that_are_not_known_are_refused_by_name(
    changes: dict[str, Any], words: str, model: Path
) -> None:
    change_config(model, **changes)
    with pytest.raises(ModelError, match=words):
        read_config(model)


def test_terms_of_positions_may_be_written_as_one_string(model: Path) -> None:
    before = read_config(model)
    change_config(model, pos_att_type="c2p|p2c")
    assert read_config(model) == before


def reference_buckets(distances: Tensor, buckets: int, longest: int) -> Tensor:
    """As transformers has it, in torch; an int of distances beyond `middle` in logarithmic steps."""
    middle = buckets // 2
    magnitude = torch.where(
        (distances < middle) & (distances > -middle), torch.tensor(middle - 1), distances.abs()
    )
    steps = torch.log(magnitude / middle) / torch.log(torch.tensor((longest - 1) / middle)) * (middle - 1)
    rounded = torch.ceil(steps) + middle
    return torch.where(magnitude <= middle, distances.float(), rounded * distances.sign()).long()


@pytest.mark.parametrize(("buckets", "longest"), [(32, 512), (256, 512), (256, 1024), (64, 128)])
def test_logarithmic_distances_are_the_references(buckets: int, longest: int) -> None:
    config = json.loads((GOLDEN / "model_b" / "config.json").read_text(encoding="utf-8"))
    config = parse_config(
        config | {"position_buckets": buckets, "max_relative_positions": longest}, "config.json"
    )
    wanted = reference_buckets(torch.arange(-512, 513), buckets, longest) + buckets
    found = tabulate_distances(config, 512).tolist()
    assert found == wanted.clamp(0, 2 * buckets - 1).tolist()


def test_without_buckets_every_distance_has_an_embedding(model: Path) -> None:
    change_config(model, position_buckets=-1)
    assert read_config(model).span == 512
    change_config(model, max_relative_positions=100)
    assert read_config(model).span == 100


def test_a_tokenizer_that_joins_pairs_otherwise_is_refused(model: Path) -> None:
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    pair = tokenizer["post_processor"]["pair"]
    tokenizer["post_processor"]["pair"] = [*pair[:3], pair[2], *pair[3:]]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ModelError, match=r"does not join two texts as \[CLS\] first \[SEP\] second \[SEP\]"):
        PromptTokenizer(model)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"backend": "openvino"}, "only torch, not openvino"),
        ({"attention": "packed"}, "Packed attention cannot be used because its disentangled attention"),
        ({"switches": "compile"}, "switch compile cannot be used"),
        ({"precision": "int8"}, "only fp32 and bf16, not int8"),
    ],
)
def test_a_wish_that_no_extraction_fulfils_is_refused_by_name(
    wish: dict[str, Any], words: str, tmp_path: Path
) -> None:
    device = Device("cpu", "cpu", 0, (), 1, 1 << 30)
    order = EncoderOrder(read_card(GOLDEN / "model"), device, "auto", "auto", 1, tmp_path)
    with pytest.raises(ModelError, match=words):
        load_encoder(replace(order, **wish))


def test_prompts_have_no_more_ids_than_the_model_has_words() -> None:
    for name in MODELS:
        assert PromptTokenizer(GOLDEN / name).num_ids == read_config(GOLDEN / name).vocab_size


def start(model: str, schema: Schema, texts: list[str]) -> tuple[Batch, list[Window]]:
    extraction = Extraction(load_tokenizer(model), schema, texts)
    prompts = extraction.start()
    assert prompts is not None
    return Batch(prompts.inputs), [window for _, window in extraction._asked]


def find_spans(logits: NDArray[np.float32], window: Window) -> list[tuple[int, int, int]]:
    """The reference's rule, cell by cell: head, tail, question."""
    first, places = window.num_hint_tokens, find_type_places(window).tolist()
    texts = range(first, len(window))
    return [
        (head, tail, question)
        for head in texts
        for tail in texts
        if head <= tail and logits[head, tail] > 0
        for question, place in enumerate(places)
        if logits[head, place] > 0 and logits[place, tail] > 0
    ]


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(["model", "model_b"]),
    types=st.lists(
        st.sampled_from(["人物", "地点", "机构", "时间", "[旧]"]), min_size=1, max_size=5, unique=True
    ),
    texts=st.lists(st.text("林晓峰在苏州 a[TYPE]", max_size=12), min_size=1, max_size=4),
    share=st.sampled_from([0.02, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_spans_of_the_cells_that_come_back_are_those_of_all_cells(
    model: str, types: list[str], texts: list[str], share: float, seed: int
) -> None:
    """In a padded batch, in order. Padding is positive where it can be."""
    batch, windows = start(model, dict.fromkeys(types), texts)
    length = batch.max_length
    random = np.random.default_rng(seed)
    logits = np.where(random.random((len(batch), length, length)) < share, 1, -1).astype(np.float32)
    logits *= 1 + random.random(logits.shape, np.float32)
    for number, window in enumerate(windows):
        logits[number, len(window) :] = logits[number, :, len(window) :] = 9
    rows = read_head(batch, logits)
    for number, window in enumerate(windows):
        cells = read_cells(rows.row(number))
        found = find_candidates(cells, find_type_places(window), window.num_hint_tokens, len(window))
        wanted = find_spans(logits[number], window)
        assert list(zip(found.heads, found.tails, found.questions, strict=True)) == wanted
        places = find_type_places(window)
        for (head, tail, question), mean, turned in zip(
            wanted, found.confidences, found.transposed, strict=True
        ):
            three = [(head, tail), (head, places[question]), (places[question], tail)]
            for value, cell_values in (
                (mean, [logits[number, row, column] for row, column in three]),
                (turned, [logits[number, column, row] for row, column in three]),
            ):
                assert abs(value - np.mean([1 / (1 + np.exp(-logit)) for logit in cell_values])) < 1e-4


def test_cells_of_spans_without_a_type_do_not_come_back() -> None:
    """With a model that finds every second cell positive, and no end of any type, nothing is sent but the count."""
    batch, windows = start("model", {"人物": None}, ["林晓峰上周在苏州参观了晨光机械厂。"])
    logits = np.ones((1, batch.max_length, batch.max_length), np.float32)
    (place,) = windows[0].hint.type_places.tolist()
    logits[:, :, place] = -1
    logits[:, place, :] = -1
    assert read_head(batch, logits).covered.tolist() == [0.0]


def test_a_blank_sequence_sends_the_first_tokens_cells_whatever_their_signs() -> None:
    case = find_case("s_cls_blank")
    extraction = extract_of(case)
    prompts = extraction.start()
    assert prompts is not None
    assert "is_blank" not in prompts.inputs
    length = Batch(prompts.inputs).max_length
    blank = extraction.take(read_head(Batch(prompts.inputs), np.full((1, length, length), -1, np.float32)))
    assert blank is not None
    window = extraction._asked[0][1]
    first = window.num_hint_tokens
    logits = np.arange(length * length, dtype=np.float32).reshape(1, length, length) - length * length
    cells = read_cells(read_head(Batch(blank.inputs), logits).row(0))
    places = window.hint.type_places.tolist()
    wanted = {(first, first), *((first, place) for place in places), *((place, first) for place in places)}
    assert {(int(row), int(column)) for row, column, _, _ in cells} == wanted
    for row, column, logit, turned in cells:
        assert logit == logits[0, int(row), int(column)]
        assert turned == logits[0, int(column), int(row)]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_told_and_only_of_its_own_sequence(value: float) -> None:
    batch, _ = start("model", {"人物": None}, ["林晓峰", "林晓峰在苏州。"])
    logits = np.full((2, batch.max_length, batch.max_length), -1, np.float32)
    logits[0, 0, -1] = value  # padding of the first
    logits[1, 3, 3] = value
    rows = read_head(batch, logits)
    assert read_cells(rows.row(0)).shape == (0, 4)
    with pytest.raises(NonFiniteLogits):
        read_cells(rows.row(1))


def test_more_cells_than_the_bound_are_counted_and_not_sent() -> None:
    batch, windows = start("model", {"人物": None}, ["林晓峰", "林晓峰在苏州。"])
    logits = np.ones((2, batch.max_length, batch.max_length), np.float32)
    num_text = [len(window) - window.num_hint_tokens for window in windows]
    counts = [number * (number + 1) // 2 + 2 * number for number in num_text]
    rows = read_head(batch, logits, max_cells=counts[0])
    assert rows.lengths.tolist() == [1 + 4 * counts[0], 1]
    assert rows.row(1).tolist() == [counts[1]]
    assert len(read_cells(rows.row(0))) == counts[0]
    with pytest.raises(TooManyCells, match=str(counts[1])):
        read_cells(rows.row(1))


def test_type_tokens_in_a_text_ask_nothing() -> None:
    """A [TYPE] typed into a text is read as structure by the model, but is no question."""
    batch, windows = start("model", {"人物": None}, ["林[TYPE]晓峰"])
    logits = np.ones((1, batch.max_length, batch.max_length), np.float32)
    cells = read_cells(read_head(batch, logits).row(0))
    in_hint = {int(row) for row, column, _, _ in cells if row < windows[0].num_hint_tokens}
    assert in_hint == set(windows[0].hint.type_places.tolist())


def test_a_missing_tokenizer_file_is_said_with_how_to_write_it(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="save_pretrained"):
        PromptTokenizer(model)
