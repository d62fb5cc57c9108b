"""The identity of a model: a digest of all bytes of its files, each of which is read once."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import DEVICE, packaged_model, read_card
from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.models import identity
from vectormill.models.card_reader import rename
from vectormill.models.identity import identify_directory
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import Registry
from vectormill.models.specs import make_spec, settle_spec
from vectormill.models.tensor_headers import read_header_bytes
from vectormill.settings import ModelEntry
from worker.encoder.encoder import EncoderOrder
from worker.openvino.conversion import fingerprint_conversion

WEIGHTS = "model.safetensors"
# No sample of the former identity lies within this tensor.
NORM = "encoder.layer.5.output.LayerNorm.weight"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The starts of the pieces that are read from now on, of files that count as old."""
    starts: list[int] = []
    digest = identity._digest_piece

    def note(descriptor: int, size: int, start: int) -> bytes:
        starts.append(start)
        return digest(descriptor, size, start)

    monkeypatch.setattr(identity, "_digest_piece", note)
    monkeypatch.setattr(identity, "SETTLED_SECONDS", -3600.0)
    monkeypatch.setattr(identity, "LEAST_KEPT_BYTES", 16)
    return starts


def write_weights(directory: Path, content: bytes = bytes(100)) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / WEIGHTS).write_bytes(content)
    return directory


def test_a_layer_norm_that_is_changed_in_place_is_another_model_with_the_former_name_of_the_old(
    tmp_path: Path,
) -> None:
    directory = Path(shutil.copytree(packaged_model(), tmp_path / "m"))
    before = read_card(directory)
    header, start = read_header_bytes(directory / WEIGHTS)
    first, last = json.loads(header)[NORM]["data_offsets"]
    with (directory / WEIGHTS).open("r+b") as file:
        file.seek(start + first)
        file.write(bytes(last - first))
    after = read_card(directory)
    assert after.aliases == before.aliases == (read_model_card("m", directory).revision,)
    assert after.revision not in before.revisions

    def name_conversion(card: ModelCard) -> str:
        return fingerprint_conversion(EncoderOrder(card, DEVICE, "openvino", "fp32", 1, tmp_path), "fp32")

    assert name_conversion(after) != name_conversion(before)


@given(st.integers(0, 99), st.integers(1, 255))
def test_each_byte_of_each_piece_is_part_of_the_identity(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int
) -> None:
    directory = write_weights(tmp_path_factory.mktemp("m"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "PIECE_BYTES", 32)
        before = identify_directory(directory)
        content = bytearray(100)
        content[place] = change
        assert identify_directory(write_weights(directory, bytes(content))) != before
        assert identify_directory(write_weights(directory)) == before


def test_a_file_is_part_of_the_identity_by_its_place_in_the_model(tmp_path: Path) -> None:
    found = set()
    for number, name in enumerate(("config.json", "1_Pooling/config.json", "0_T/vocab.json", "a.jinja")):
        path = write_weights(tmp_path / str(number)) / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        found.add(identify_directory(tmp_path / str(number)))
    assert len(found) == 4


def test_a_file_is_read_once_until_it_is_touched(tmp_path: Path, reads: list[int]) -> None:
    directory, kept = write_weights(tmp_path / "m"), tmp_path / "kept"
    first = identify_directory(directory, kept)
    assert (identify_directory(directory, kept), reads) == (first, [0])
    assert identify_directory(Path(shutil.copytree(directory, tmp_path / "copy")), kept) == first
    assert reads == [0, 0]
    os.utime(directory / WEIGHTS, ns=(0, 0))
    assert (identify_directory(directory, kept), reads) == (first, [0, 0, 0])


@pytest.mark.parametrize("content", [b"", b"no digest", "é".encode("latin-1"), b"0" * 63, b"0" * 65])
def test_what_is_kept_and_damaged_is_replaced(tmp_path: Path, reads: list[int], content: bytes) -> None:
    directory, kept = write_weights(tmp_path / "m"), tmp_path / "kept"
    first = identify_directory(directory, kept)
    (place,) = kept.iterdir()
    place.write_bytes(content)
    assert [identify_directory(directory, kept) for _ in range(2)] == [first] * 2
    assert reads == [0, 0]


def test_where_nothing_can_be_kept_a_file_is_read_each_time(tmp_path: Path, reads: list[int]) -> None:
    directory, kept = write_weights(tmp_path / "m"), tmp_path / "kept"
    kept.write_text("no folder")
    assert identify_directory(directory, kept) == identify_directory(directory, kept)
    assert reads == [0, 0]


def test_a_file_that_may_change_again_without_a_trace_is_not_kept(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "SETTLED_SECONDS", 3600.0)
    directory, kept = write_weights(tmp_path / "m"), tmp_path / "kept"
    identify_directory(directory, kept)
    assert not kept.exists()


def test_the_oldest_digests_are_removed(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "MOST_KEPT", 2)
    for number in range(4):
        identify_directory(write_weights(tmp_path / str(number)), tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2
    identify_directory(tmp_path / "3", tmp_path / "kept")
    assert len(reads) == 4


def test_the_former_name_is_the_one_that_former_releases_stored() -> None:
    assert read_card(packaged_model()).aliases == ("8f38b9232d6fc2ac",)


def test_a_named_revision_is_the_identity_and_nothing_is_hashed(tmp_path: Path, reads: list[int]) -> None:
    entry = ModelEntry(path=str(packaged_model()), revision="mine")
    card = Registry({"m": entry}).card("m")
    assert (card.revision, card.aliases, reads) == ("mine", (), [])


def test_a_named_revision_that_is_read_otherwise_than_before_is_another_one() -> None:
    card = read_card(packaged_model())
    stored = replace(card, revision="commit+adapter", aliases=())
    assert rename(stored, None) == stored
    anew = rename(replace(stored, rereads=("It is cut at its beginning.",)), None)
    assert (anew.revision, anew.aliases) == ("commit+adapter+read", ("commit+adapter",))
    assert [anew.reads_as_before(each) for each in (*anew.revisions, "other")] == [False, True, False]
    called = replace(stored, named=("splade",))
    assert rename(called, None).revisions == ("commit+adapter+splade", "commit+adapter")
    hashed = rename(replace(stored, revision=f"{16 * '0'}+adapter"), 16 * "1")
    assert (hashed.revision, hashed.aliases) == (f"{16 * '1'}+adapter", (f"{16 * '0'}+adapter",))
    assert [hashed.reads_as_before(each) for each in hashed.revisions] == [False, False]
    before = EncodingSpec.from_json({**spec_of(card).to_json(), "revision": "commit+adapter"})
    assert settle_spec(anew, before) == before


def spec_of(card: ModelCard, **options: object) -> EncodingSpec:
    return make_spec(card, EncodingOptions(**options))  # type: ignore[arg-type]


def test_a_spec_is_stored_and_compared_without_former_names_and_repeated_requests_are_known_by_them() -> None:
    card = read_card(packaged_model())
    now = spec_of(card)
    former = EncodingSpec.from_json({**now.to_json(), "revision": card.aliases[0], "aliases": ["forged"]})
    assert ("aliases" in now.to_json(), former.aliases) == (False, ())
    assert now.fingerprint() != former.fingerprint()
    assert now.content() == former.content()
    assert now.adopt(former) == former == former.adopt(now)
    assert now.adopt(spec_of(card)) == now
    assert settle_spec(card, former) == now
    assert settle_spec(card, former).adopt(former) == former
