"""Certificates are read as they were written, an edited one is refused, and only what matters is a failure."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vectormill.domain.errors import ConfigurationError, UnsupportedModel
from vectormill.models.model_card import REXUNINLU
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from worker.certificates.certificate import (
    Certificate,
    Circumstances,
    Closeness,
    Combination,
    Method,
    Unmeasured,
    find_breaches,
    find_changed_files,
    find_newest,
    find_promise,
    make_measurement,
    name_certificate,
    read_certificate,
    write_certificate,
)
from worker.certificates.measuring import (
    QUERY_CHARS,
    Choices,
    choose_spec,
    find_agreement,
    find_rank_agreement,
    list_combinations,
    make_texts,
)
from worker.devices.described import describe_inventory

CARD = Registry({}).card(DEFAULT_MODEL, weights=True)
SPEC = make_spec(CARD, EncodingOptions())
COMBINATION = Combination("torch", "fp32", "padded", "replicate", "cpu")


CERTIFICATE = Certificate(
    model=DEFAULT_MODEL,
    spec=SPEC,
    files={"model.safetensors": "ab", "tokenizer.json": "cd"},
    circumstances=Circumstances({"torch": "2.13.0"}, "Xeon", ["amx_bf16"], {"cpu:0": "Xeon"}),
    method=Method("sentence-transformers 6.2.0", 25, 150, 256, 4),
    measurements=[
        make_measurement(COMBINATION, {"alone": Closeness(0.99999, 0.999995)}, 0.998, 0.9999),
        make_measurement(COMBINATION, {"alone": Closeness(0.998, 0.999)}, 0.9, 0.999),
    ],
    unmeasured=[Unmeasured(replace(COMBINATION, precision="fp16"), "fp16 is not supported.")],
    measured_at="2026-11-27T18:00:00Z",
)


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = name_certificate(tmp_path, "BAAI/bge-m3")
    assert path == tmp_path / "certificates" / "BAAI--bge-m3.json"
    write_certificate(CERTIFICATE, path)
    assert read_certificate(path) == CERTIFICATE
    assert find_newest(tmp_path) == path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content["measurements"][0].update(bound=0.5), "digest is another"),
        (lambda content: content["files"].update({"model.safetensors": "ef"}), "digest is another"),
        (lambda content: content.update(format="another"), "has another format"),
        (lambda content: content.pop("digest"), "'digest'"),
    ],
)
def test_an_edited_certificate_is_refused(change: object, reason: str, tmp_path: Path) -> None:
    content = CERTIFICATE.to_json()
    change(content)  # type: ignore[operator]
    (tmp_path / "edited.json").write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=reason):
        read_certificate(tmp_path / "edited.json")


def test_other_files_of_the_model_are_named() -> None:
    now = {"model.safetensors": "xx", "config.json": "ef"}
    assert find_changed_files(CERTIFICATE, now) == [
        "The file config.json of all-MiniLM-L6-v2 is new.",
        "The file model.safetensors of all-MiniLM-L6-v2 has another content.",
        "The file tokenizer.json of all-MiniLM-L6-v2 is missing.",
    ]


def test_a_bound_is_the_promise_unless_less_was_measured() -> None:
    kept, broken = CERTIFICATE.measurements
    assert (kept.bound, kept.keeps_promise) == (0.9999, True)
    assert (broken.bound, broken.keeps_promise) == (0.998, False)


@pytest.mark.parametrize(
    ("smallest", "ranks", "num_breaches"),
    [
        (0.99999, 0.998, 0),
        (0.99991, 0.98, 0),  # less than was measured, and within the bounds
        (0.9998, 0.998, 1),
        (0.99999, 0.97, 1),
        (0.5, 0.5, 2),
    ],
)
def test_only_what_leaves_the_bounds_is_a_breach(smallest: float, ranks: float, num_breaches: int) -> None:
    found = make_measurement(COMBINATION, {"alone": Closeness(smallest, 1.0)}, ranks, 0.9999)
    assert len(list(find_breaches(CERTIFICATE.measurements[0], found))) == num_breaches


def test_each_precision_promises_what_the_architecture_says() -> None:
    scores = replace(SPEC, task="score")
    assert [find_promise(SPEC, each) for each in ("fp32", "bf16", "fp16", "int8")] == [
        0.9999,
        0.999,
        0.999,
        0.998,
    ]
    assert find_promise(SPEC, "bf16", ("fp8",)) == find_promise(SPEC, "int8", ("fp8",)) == 0.99
    assert [find_promise(scores, each) for each in ("fp32", "bf16")] == [0.9999, 0.98]


def test_texts_have_many_scripts_and_every_length_to_beyond_the_window() -> None:
    texts = make_texts(SPEC, 25)
    assert texts == make_texts(SPEC, 25) != make_texts(SPEC, 26)
    lengths = sorted(len(text.split()) for text in texts)
    assert lengths[0] == 1
    assert lengths[-1] == 2 * SPEC.max_tokens
    scripts = {character for text in texts for character in text.decode()}
    for letter in ("é", "Σ", "ж", "ש", "ع", "न", "த", "ก", "ა", "水", "て", "간", "👍"):
        assert letter in scripts, letter
    mixed = make_texts(replace(SPEC, task="score", labels=("no", "yes")), 25)
    assert sum(b"\xff" in text for text in mixed) == len(mixed) // 2
    pairs = make_texts(replace(SPEC, task="score"), 25)  # without labels, nothing but pairs is read
    assert all(len(text.split(b"\xff")[0].decode()) <= QUERY_CHARS for text in pairs)
    assert len(pairs) == sum(b"\xff" in text for text in pairs)


def test_agreement_is_the_cosine_of_vectors_and_the_difference_of_scores() -> None:
    one = np.array([[1.0, 0.0], [3.0, 4.0]], dtype=np.float32)
    other = np.array([[2.0, 0.0], [4.0, 3.0]], dtype=np.float32)
    assert find_agreement(SPEC, one, other).tolist() == pytest.approx([1.0, 0.96])
    # 1 is compared as it is, 4 by its size.
    assert find_agreement(replace(SPEC, task="score"), one, other).tolist() == pytest.approx([0.0, 1 - 1 / 3])


def test_rankings_agree_by_the_share_of_their_ten_best() -> None:
    vectors = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    assert find_rank_agreement(SPEC, vectors, 2 * vectors) == 1.0
    assert find_rank_agreement(SPEC, vectors, vectors[::-1]) < 0.6
    scores = replace(SPEC, task="score")
    assert find_rank_agreement(scores, vectors, vectors) == 1.0
    assert find_rank_agreement(scores, vectors, -vectors) == 0.0


def combine(choices: Choices, machine: str) -> set[str]:
    return {str(each) for each in list_combinations(CARD, choices, describe_inventory(machine))}


def test_every_backend_precision_and_placement_of_a_machine_is_measured() -> None:
    every = combine(Choices(), "1x2cores,8GiB")
    assert {
        "openvino fp32, padded, replicate on cpu",
        "torch int8, padded, replicate on cpu",
        "torch fp32, packed, replicate on cpu",
        "torch fp32, tensor on cpu:0,cpu:1",
        "torch fp32, pipeline on cpu:0,cpu:1",
        "torch int8, fully_sharded on cpu:0,cpu:1",
    } <= every
    cards = combine(Choices(precision="bf16"), "2x24GiB,nvlink")
    assert cards == {
        "torch bf16, padded, replicate on cuda:0",
        "torch bf16, packed, replicate on cuda:0",
        *(f"torch bf16, {each} on cuda:0,cuda:1" for each in ("pipeline", "tensor", "fully_sharded")),
    }


def test_choices_leave_out_the_others() -> None:
    only = Choices(precision="fp32", backend="openvino")
    assert combine(only, "1x2cores,8GiB") == {"openvino fp32, padded, replicate on cpu"}
    only = Choices(precision="fp32", strategy="tensor")
    assert combine(only, "1x2cores,8GiB") == {"torch fp32, tensor on cpu:0,cpu:1"}


def test_an_extractor_has_no_reference() -> None:
    with pytest.raises(UnsupportedModel, match="no reference"):
        choose_spec(replace(CARD, extractor=REXUNINLU))
    with pytest.raises(
        UnsupportedModel, match="computes sparse, and a certificate compares dense vectors or scores"
    ):
        choose_spec(replace(CARD, outputs=("sparse",)))


def test_long_windows_are_read_in_part_unless_more_is_asked_for() -> None:
    wide = replace(CARD, max_tokens=8192)
    assert choose_spec(wide).max_tokens == 2048
    assert choose_spec(wide, 8192).max_tokens == 8192
