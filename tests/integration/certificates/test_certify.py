"""`certify` and `verify` with real model processes: a certificate holds until the model or its results change."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.classifiers import write_classifier
from tests.commands import run
from tests.models import DEVICE, TinyModels
from tests.static_models import GOLDEN, write_static
from vectormill.domain.errors import ModelError
from vectormill.models.registry import open_registry
from vectormill.settings import Settings
from worker.certificates.certificate import digest_content
from worker.certificates.measuring import check_loaded, find_certificate
from worker.engine.engine import Engine
from worker.settings import WorkerSettings

# Each combination starts two model processes. Those of openvino need no torch, and start in a second.
ONE = ("--precision", "fp32", "--backend", "openvino", "--strategy", "replicate")
PADDED_AND_PACKED = ("--precision", "fp32", "--backend", "torch", "--strategy", "replicate")


def compute_references_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute references of one model in this process: one of its own imports the library each time anew."""
    monkeypatch.setattr("worker.certificates.measuring.open_child", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr("worker.model.plain._loaded", [])


def change(path: Path, edit: Any) -> None:
    """Edit a certificate as somebody would who writes the digest anew."""
    content = json.loads(path.read_text())
    del content["digest"]
    edit(content)
    path.write_text(json.dumps({**content, "digest": digest_content(content)}))


@pytest.fixture(autouse=True)
def _own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("VECTORMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("VECTORMILL_WORKER_THREADS", "1")  # two wait for each other longer than they compute


# The model that the core certifies by `models add` is a transformer too.
@pytest.mark.parametrize("is_static", [True, False])
def test_a_certificate_holds_until_the_model_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_static: bool
) -> None:
    model = tmp_path / "model"
    if is_static:
        write_static(model, normalize=True)
        compute_references_here(monkeypatch)
    else:
        tiny = TinyModels(tmp_path / "tiny").sentence_transformer("cls+mean", dense=True, normalize=True)
        shutil.copytree(tiny, model)
    assert run("certify", str(model), *(() if is_static else ONE), "--json") == 0
    said = capfd.readouterr()
    assert "runner INFO" not in said.err, "among the progress"
    written = json.loads(said.out)
    assert written["method"]["reference"].startswith("sentence-transformers ")
    (each,) = written["measurements"]
    assert each["ways"].keys() == {"alone", "in batches", "in batches after a restart"}
    assert each["smallest"] > each["bound"] == 0.9999
    assert each["rank_agreement"] > 0.99
    assert {name.rpartition("/")[2] for name in written["files"]} >= {"model.safetensors", "tokenizer.json"}
    if not is_static:
        assert written["method"]["longest_tokens"] == written["spec"]["max_tokens"] == 64
        assert written["method"]["num_truncated"] > 5
        assert "1_Pooling/config.json" in written["files"]
    (path,) = (tmp_path / "data" / "certificates").iterdir()
    assert str(path) in said.err

    check_workers(
        model, path, WorkerSettings() if is_static else WorkerSettings(backend="openvino", precision="fp32")
    )
    compute_references_here(monkeypatch)
    assert run("verify") == 0
    assert "Everything is as certified." in capfd.readouterr().err

    weights = next(model.rglob("model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run("verify", str(path), "--json") == 1
    verdict = json.loads(capfd.readouterr().out)
    assert any("model.safetensors" in failure for failure in verdict["failures"])
    assert verdict["measurements"] == [], "another model is not measured"


def check_workers(model: Path, path: Path, settings: WorkerSettings) -> None:
    """A worker that loads the certified model is compared with the reference, and refused outside of the bounds."""
    card = open_registry(Settings(), str(model)).card(str(model), weights=True)
    certificate = find_certificate(path.parents[1], card)
    assert certificate is not None
    another = replace(card, revision="another", aliases=())
    assert find_certificate(path.parents[1], another) is None
    renamed = replace(another, aliases=(card.revision,))
    assert find_certificate(path.parents[1], renamed) == certificate
    assert find_certificate(path.parents[1], replace(renamed, rereads=("It is cut.",))) is None
    engine = Engine(card, DEVICE, settings, model.parent / "cache")
    engine.start()
    try:
        check_loaded(engine, certificate)
        text, *_ = certificate.known
        wrong = {**certificate.known, text: np.ones(card.dimension, dtype="<f4").tobytes().hex()}
        with pytest.raises(ModelError, match="agrees with the reference of the certificate by"):
            check_loaded(engine, replace(certificate, known=wrong))
    finally:
        engine.stop()


def test_a_classifier_is_certified_by_its_scores_and_a_bound_that_is_not_kept_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_references_here(monkeypatch)
    model = write_classifier(tmp_path / "model", "bert")
    target = tmp_path / "here.json"
    assert run("certify", str(model), *PADDED_AND_PACKED, "--to", str(target), "--json") == 0
    written = json.loads(capsys.readouterr().out)
    assert written["method"]["reference"].startswith("transformers ")
    assert [each["combination"]["attention"] for each in written["measurements"]] == ["padded", "packed"]
    assert all(each["smallest"] > 0.9999 for each in written["measurements"])
    assert target.is_file()
    assert not (tmp_path / "data").exists()

    def claim_more(content: dict[str, Any]) -> None:
        del content["measurements"][1]
        content["measurements"][0]["bound"] = 1.5
        content["circumstances"]["processor"] = "Z80"

    change(target, claim_more)
    assert run("verify", str(target), "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert len(verdict["failures"]) == 3, "one for each way of encoding"
    assert any("was Z80" in note for note in verdict["notes"]), "another processor is told"


def test_a_model_without_files_or_a_reference_is_refused_by_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for model, said in (
        ("no-such-model", "Unknown model 'no-such-model'"),
        (str(GOLDEN / "whole"), "which sentence-transformers reads by other rules"),
    ):
        assert run("certify", model) == 2
        assert said in capsys.readouterr().err
