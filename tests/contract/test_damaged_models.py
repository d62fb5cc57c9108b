"""A damaged file of a model is named by one sentence, whatever the damage: nothing else is raised, and nothing hangs.

Each small file of a model of each kind is damaged as a whole, and each value in it is replaced by those of other types.
"""

import json
import shutil
import signal
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters import ADAPTER, write_adapted
from tests.contract.packed_models import TOKENIZER, make_transformer
from tests.contract.saved_models import (
    Small,
    write_classifier,
    write_colbert,
    write_dense,
    write_logit_score,
    write_splade,
    write_static,
)
from tests.gliner_models import GOLDEN as GLINERS
from tests.static_models import GOLDEN as STATIC
from vectormill.domain.errors import ModelError
from vectormill.models.layouts import read_model_card
from vectormill.models.model_entry import ModelEntry
from vectormill.models.registry import Registry

POINTER: Final = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
WHOLE: Final[dict[str, Callable[[bytes], bytes]]] = {
    "pointer of Git LFS": lambda _: POINTER,
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "Latin-1": lambda content: b'{"\xe9": 1, ' + content[1:],
    "NUL": lambda content: b"\0" * len(content),
    "number": lambda _: b"7",
    "text": lambda _: b'"text"',
    "null": lambda _: b"null",
    "list of numbers": lambda _: b"[1, 2]",
}
VALUES: Final[tuple[Any, ...]] = (
    None,
    [1],
    {"a": 1},
    "text",
    3,
    [],
    -1,
    [{}],
    10**30,
    {},
    ["a"],
    "",
    2.5,
    float("nan"),
    True,
    0,
    False,
)
# The values that are tried in each place of the files of transformers, of which others follow in the next place.
NUM_TRIED: Final = 4
# An entry of a list or of a large table stands for its neighbours.
MOST_ENTRIES: Final = 2
SECONDS: Final = 3.0
OF_TRANSFORMERS: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def copy_of(source: Path, directory: Path) -> None:
    shutil.copytree(source, directory)


def write_adapted_model(directory: Path) -> None:
    write_adapted(directory)


KINDS: Final[dict[str, tuple[Callable[[Path], object], dict[str, Any]]]] = {
    "embedder": (write_dense, {}),
    "classifier": (partial(write_classifier, num_labels=3), {}),
    "static": (write_static, {}),
    "model2vec": (partial(copy_of, STATIC / "whole"), {}),
    "splade": (write_splade, {}),
    "colbert": (write_colbert, {}),
    "reranker": (write_logit_score, {}),
    "gliner": (partial(copy_of, next(path for path in sorted(GLINERS.iterdir()) if path.is_dir())), {}),
    "adapter": (write_adapted_model, {"adapter": ADAPTER}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = Small.home = tmp_path_factory.mktemp("damaged")
    for name, (write, _) in KINDS.items():
        write(home / name)
    return home


class TooLong(BaseException):
    """Says that a file was read for too long."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def find_flaw(directory: Path, name: str, options: Mapping[str, Any], **more: Any) -> str:
    """Return what is wrong with how a damaged file is told; empty if there is a card, or a sentence that names it."""
    try:
        with limited():
            read_model_card("small", directory, ModelEntry(path=str(directory), **options, **more))
    except ModelError as error:
        told = str(error)
        return "" if all(part in told for part in Path(name).parts) else f"it is not named: {told}"
    except BaseException as error:  # whatever it is, nobody expects it
        return f"{type(error).__name__}: {error}"
    return ""


def list_files(directory: Path) -> list[Path]:
    """Return the small files of a model that are JSON."""
    return sorted(path for path in directory.rglob("*.json") if path.parent.name != "tests")


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values in a JSON value; of a large list or table only some."""
    if place:
        yield place
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if isinstance(value, dict) and len(keys) < 40 else keys[:MOST_ENTRIES]:
            yield from list_places(value[key], (*place, key))


def replace_at(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy in which another value stands at the place."""
    if not place:
        return new
    changed = value.copy()
    changed[place[0]] = replace_at(value[place[0]], place[1:], new)
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_damaged_as_a_whole_is_named(kind: str, models: Path) -> None:
    directory, options = models / kind, KINDS[kind][1]
    flaws = {}
    for path in list_files(directory):
        name, content = str(path.relative_to(directory)), path.read_bytes()
        for damage, make in WHOLE.items():
            path.write_bytes(make(content))
            if flaw := find_flaw(directory, name, options):
                flaws[name, damage] = flaw
        path.write_bytes(content)
    assert not flaws
    assert not find_flaw(directory, "", options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_type_is_read_or_refused(kind: str, models: Path) -> None:
    directory, options = models / kind, KINDS[kind][1]
    flaws, count = {}, 0
    for path in list_files(directory):
        name, content = str(path.relative_to(directory)), path.read_text()
        told = json.loads(content)
        num_tried = NUM_TRIED if path.name in OF_TRANSFORMERS and path.parent == directory else len(VALUES)
        for number, place in enumerate(list_places(told)):
            for value in islice(cycle(VALUES), number * num_tried, (number + 1) * num_tried):
                count += 1
                path.write_text(json.dumps(replace_at(told, place, value)))
                if flaw := find_flaw(directory, "", options, revision="r"):
                    flaws[name, place, repr(value)] = flaw
        path.write_text(content)
    assert not flaws, f"{len(flaws)} of {count}"


def replace_header(header: bytes, content: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + content[8:]


HEADERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "pointer of Git LFS": lambda _: POINTER,
    "empty": lambda _: b"",
    "cut in the length": lambda content: content[:5],
    "cut in the header": lambda content: content[:40],
    "length beyond the file": lambda content: struct.pack("<Q", len(content) * 2) + content[8:],
    "huge length": lambda content: struct.pack("<Q", 2**63) + content[8:],
    "length 0": lambda content: struct.pack("<Q", 0) + content[8:],
    **{
        f"header {text[:20]!r}": partial(replace_header, text)
        for text in (
            b"[]",
            b"null",
            b"{",
            b'{"a": 1}',
            b'{"a": {}}',
            b'{"a": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
            b"\xff\xfe{}",
        )
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_whose_header_is_damaged_are_named(kind: str, models: Path) -> None:
    directory, options = models / kind, KINDS[kind][1]
    flaws = {}
    for path in sorted(directory.rglob("*.safetensors")):
        name, content = str(path.relative_to(directory)), path.read_bytes()
        for damage, make in HEADERS.items():
            for more in ({}, {"revision": "r"}):
                path.write_bytes(make(content))
                if flaw := find_flaw(directory, name, options, **more):
                    flaws[name, damage] = flaw
        path.write_bytes(content)
    assert not flaws


def test_a_damaged_model_leaves_the_others_alone(models: Path, tmp_path: Path) -> None:
    torn = shutil.copytree(models / "embedder", tmp_path / "torn")
    (torn / "modules.json").write_text("[{")
    pointer = shutil.copytree(models / "embedder", tmp_path / "pointer")
    (pointer / "model.safetensors").write_bytes(POINTER)
    directories = {"sound": models / "embedder", "torn": torn, "pointer": pointer}
    registry = Registry({name: ModelEntry(path=str(path)) for name, path in directories.items()})
    found = registry.cards(sorted(directories), weights=True)
    assert not isinstance(found["sound"], ModelError)
    assert found["sound"].dimension == 24
    for name, file in (("torn", "modules.json"), ("pointer", "model.safetensors")):
        assert isinstance(found[name], ModelError)
        assert file in str(found[name])


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "gptq", "awq", ""])
def test_quantized_weights_are_refused_with_what_to_take_instead(tmp_path: Path, method: str) -> None:
    """Their numbers without the scales would be read as if they were weights."""
    make_transformer("qwen3").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    config = tmp_path / "config.json"
    if method:
        described = json.loads(config.read_text()) | {"quantization_config": {"quant_method": method}}
        config.write_text(json.dumps(described))
    else:
        weights = load_file(tmp_path / "model.safetensors")
        rounded = {
            name: value.to(torch.float8_e4m3fn) if value.ndim == 2 else value
            for name, value in weights.items()
        }
        save_file(rounded, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=rf"quantized \({method or 'fp8'}\).*the checkpoint in 16 or 32 bits"
    ):
        read_model_card("model", tmp_path, ModelEntry(path=str(tmp_path), pooling="mean"))
