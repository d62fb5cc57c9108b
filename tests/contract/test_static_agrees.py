"""Static embeddings are those of their authors' packages, model2vec and sentence-transformers, without torch."""

import json
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.models import DEVICE, TEXTS, smallest_cosine
from tests.static_models import GOLDEN, KNOWN, write_static
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.errors import ModelError
from vectormill.domain.task import write_token_ids
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import Registry, make_spec
from vectormill.settings import ModelEntry
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import EncoderOrder
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.settings import WorkerSettings
from worker.tasks.finishing import finish_vectors
from worker.tokens.tokenizer import StaticTokenizer


def read_card(directory: Path, **options: Any) -> ModelCard:
    return Registry({"m": ModelEntry(path=str(directory), **options)}).card("m", weights=True)


def encode(directory: Path, texts: list[str], *, alone: bool = False) -> NDArray[np.float32]:
    """Return our vectors of texts, all in one batch or each alone."""
    card = read_card(directory)
    spec = make_spec(card, EncodingOptions())
    encoder = load_encoder(EncoderOrder(card, DEVICE, "auto", "auto", 1, directory))
    tokenized = StaticTokenizer(card).tokenize(texts, spec.max_tokens, truncate=True)
    rows = [tokenized.ids(number) for number in range(len(texts))]
    batches = [Batch.from_ids([row]) for row in rows] if alone else [Batch.from_ids(rows)]
    return finish_vectors(np.concatenate([encoder.encode(batch).matrix for batch in batches]), spec)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("whole", 1e-6),
        ("half", 2e-3),  # the package rounds vectors to the type of the table
        ("quantized", 1e-3),  # of numbers up to 94, which the package adds up in 64 bits
    ],
)
def test_the_vectors_are_those_of_model2vec(name: str, tolerance: float) -> None:
    """Cut texts, unknown tokens, and tables of fewer rows than tokens among them (tests/data/model2vec/make.py)."""
    found = encode(GOLDEN / name, KNOWN["texts"])
    assert np.abs(found - np.array(KNOWN["vectors"][name])).max() < tolerance


def by_authors(directory: Path, texts: list[str]) -> NDArray[np.float32]:
    """Return their vectors, by a model which they save anew as it was."""
    from sentence_transformers import SentenceTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
        vectors: NDArray[np.float32] = model.encode(texts, show_progress_bar=False)
        model.save(str(directory / "saved"))
    for name in ("modules.json", "tokenizer.json"):
        assert json.loads((directory / name).read_text()) == json.loads(
            (directory / "saved" / name).read_text()
        )
    assert (
        load_file(directory / "model.safetensors").keys()
        == load_file(directory / "saved/model.safetensors").keys()
    )
    return vectors


@pytest.mark.parametrize("truncated", [None, 16])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_vectors_are_those_of_sentence_transformers(
    normalize: bool, truncated: int | None, tmp_path: Path
) -> None:
    directory = write_static(tmp_path / "model", normalize=normalize, truncated=truncated)
    texts = [*TEXTS, " ".join(TEXTS) * 20, "漢字かな [CLS] 🙂🏽"]  # unknown and special tokens are read too
    found = encode(directory, texts)
    assert np.abs(found - by_authors(directory, texts)).max() < 1e-5
    assert read_card(directory).normalize == normalize


@pytest.mark.parametrize("name", ["whole", "half", "quantized"])
def test_a_text_has_the_same_bits_alone_and_in_any_batch(name: str) -> None:
    texts = [*KNOWN["texts"], *(" ".join(TEXTS)[start:] for start in range(0, 4000, 7))]
    found = encode(GOLDEN / name, texts)
    assert found.tobytes() == encode(GOLDEN / name, texts, alone=True).tobytes()
    assert found[::-1].tobytes() == encode(GOLDEN / name, texts[::-1]).tobytes()


def ask(engine: Engine, card: ModelCard, texts: list[str], **options: Any) -> EncodeResult:
    spec = make_spec(card, EncodingOptions(**options))
    encoded = [text.encode() for text in texts]
    return engine.encode(EncodeRequest("r", spec, encoded, False, 1_000_000), threading.Event())


def test_an_engine_encodes_in_a_process_without_torch(tmp_path: Path) -> None:
    card = read_card(GOLDEN / "whole")
    engine = Engine(card, DEVICE, WorkerSettings(), tmp_path)
    engine.start()
    try:
        result = ask(engine, card, KNOWN["texts"])
        maps = Path(f"/proc/{engine.find_pid()}/maps").read_text()
        report = engine.report()
    finally:
        engine.stop()
    assert "libtorch" not in maps
    assert "openvino" not in maps
    assert (report["backend"]["value"], report["precision"]["value"]) == ("numpy", "fp32")
    expected = np.array(KNOWN["vectors"]["whole"], np.float32)
    is_known = np.abs(expected).sum(axis=1) > 0
    assert smallest_cosine(result.results.matrix[is_known], expected[is_known]) > 0.9999
    unknown = np.flatnonzero(~is_known).tolist()
    assert [result.failures[index].code for index in unknown] == ["empty_text"], "it has no direction"


def test_a_process_that_adds_up_static_embeddings_imports_no_framework() -> None:
    program = (
        "import sys, worker.runner.runner_process, worker.encoder.static_encoder\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & "
        "{'torch', 'transformers', 'openvino', 'tokenizers', 'safetensors'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_truncation_is_told_whether_tokens_or_characters_were_counted() -> None:
    card = read_card(GOLDEN / "whole")
    tokenizer = StaticTokenizer(card)
    texts = ["with", "with " * 12, "w" + " " * 500 + "i"]
    found = tokenizer.tokenize(texts, 10, truncate=True)
    assert found.truncated.tolist() == [False, True, True]
    assert found.lengths.max() <= 10
    failed = tokenizer.tokenize(texts, 10, truncate=False)
    assert list(failed.failures) == [1], "a text of few tokens is read whole if it must not be cut"


def test_passages_and_token_ids_leave_out_unknown_tokens_too() -> None:
    tokenizer = StaticTokenizer(read_card(GOLDEN / "whole"))
    assert tokenizer.tokenize_whole(["with \u6f22", "\u6f22"]).lengths.tolist() == [1, 0]
    known, unknown = tokenizer.tokenize_whole(["with"]).ids(0)[0], 0
    given = tokenizer.take_ids([write_token_ids([known, unknown, known])], "", 10, truncate=True)
    assert given.ids(0).tolist() == [known, known]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "torch"}, "need no backend"),
        ({"precision": "bf16"}, "only in fp32"),
    ],
)
def test_what_has_no_effect_on_static_embeddings_is_refused(
    options: dict[str, str], reason: str, tmp_path: Path
) -> None:
    wanted = {"backend": "auto", "precision": "auto"} | options
    order = EncoderOrder(
        read_card(GOLDEN / "half"), DEVICE, wanted["backend"], wanted["precision"], 1, tmp_path
    )
    with pytest.raises(ModelError, match=reason):
        load_encoder(order)


def test_a_model_without_modules_is_recognized_by_its_type(tmp_path: Path) -> None:
    """As the first releases of model2vec wrote it."""
    directory = shutil.copytree(GOLDEN / "whole", tmp_path / "old")
    (directory / "modules.json").unlink()
    (directory / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    assert np.array_equal(encode(directory, KNOWN["texts"]), encode(GOLDEN / "whole", KNOWN["texts"]))
