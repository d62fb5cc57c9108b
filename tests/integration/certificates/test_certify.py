"""`certify` and `verify` with real model processes: a certificate holds until the model or its results change."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.classifiers import write_classifier
from tests.models import DEVICE, TinyModels
from tests.static_models import GOLDEN, write_static
from vectormill.cli.app import main
from vectormill.domain.errors import ModelError
from vectormill.models.registry import open_registry
from vectormill.settings import Settings
from worker.certificates.certificate import digest_content
from worker.certificates.loading import check_loaded, find_certificate
from worker.engine.engine import Engine
from worker.settings import WorkerSettings

# Each combination starts two model processes. Those of openvino need no torch, and start in a second.
ONE = ("--precision", "fp32", "--backend", "openvino", "--strategy", "replicate")
PADDED_AND_PACKED = ("--precision", "fp32", "--backend", "torch", "--strategy", "replicate")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def change(path: Path, edit: Any) -> None:
    """Edit a certificate as somebody would who writes the digest anew."""
    content = json.loads(path.read_text())
    del content["digest"]
    edit(content)
    path.write_text(json.dumps({**content, "digest": digest_content(content)}))


def test_a_certificate_holds_until_the_model_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("VECTORMILL_CACHE_DIR", str(tmp_path / "cache"))
    tiny = TinyModels(tmp_path / "tiny").sentence_transformer("cls+mean", dense=True, normalize=True)
    model = Path(shutil.copytree(tiny, tmp_path / "model"))
    assert run("certify", str(model), *ONE, "--json") == 0
    said = capfd.readouterr()
    assert "runner INFO" not in said.err, "among the progress"
    written = json.loads(said.out)
    assert written["method"]["reference"].startswith("sentence-transformers ")
    (each,) = written["measurements"]
    assert each["ways"].keys() == {"alone", "in batches", "in batches after a restart"}
    assert each["smallest"] > each["bound"] == 0.9999
    assert each["rank_agreement"] > 0.99
    assert written["method"]["longest_tokens"] == written["spec"]["max_tokens"] == 64
    assert written["method"]["num_truncated"] > 5
    assert {"model.safetensors", "tokenizer.json", "1_Pooling/config.json"} <= written["files"].keys()
    (path,) = (tmp_path / "data" / "certificates").iterdir()
    assert str(path) in said.err

    check_workers(model, path, tmp_path / "cache")
    assert run("verify") == 0
    assert "Everything is as certified." in capfd.readouterr().err

    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run("verify", str(path), "--json") == 1
    verdict = json.loads(capfd.readouterr().out)
    assert any("model.safetensors" in failure for failure in verdict["failures"])
    assert verdict["measurements"] == [], "another model is not measured"


def check_workers(model: Path, path: Path, cache_dir: Path) -> None:
    """A worker that loads the certified model is compared with the reference, and refused outside of the bounds."""
    card = open_registry(Settings(), str(model)).card(str(model), weights=True)
    certificate = find_certificate(path.parents[1], card)
    assert certificate is not None
    assert find_certificate(path.parents[1], replace(card, revision="another")) is None
    engine = Engine(card, DEVICE, WorkerSettings(backend="openvino", precision="fp32"), cache_dir)
    engine.start()
    try:
        check_loaded(engine, certificate)
        text, *_ = certificate.known
        wrong = {**certificate.known, text: np.ones(24, dtype="<f4").tobytes().hex()}
        with pytest.raises(ModelError, match="agrees with the reference of the certificate by"):
            check_loaded(engine, replace(certificate, known=wrong))
    finally:
        engine.stop()


def test_static_embeddings_are_certified_in_the_one_way_that_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path / "data"))
    model = write_static(tmp_path / "model", normalize=True)
    assert run("certify", str(model), "--json") == 0
    written = json.loads(capsys.readouterr().out)
    (each,) = written["measurements"]
    assert each["smallest"] > each["bound"] == 0.9999
    assert any(name.endswith("model.safetensors") for name in written["files"])
    assert any(name.endswith("tokenizer.json") for name in written["files"])
    assert run("certify", str(GOLDEN / "whole")) == 2
    assert "which sentence-transformers reads by other rules" in capsys.readouterr().err


@pytest.mark.tail
def test_a_classifier_is_certified_by_its_scores_and_a_bound_that_is_not_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("VECTORMILL_CACHE_DIR", str(tmp_path / "cache"))
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


def test_a_model_that_does_not_exist_is_refused_by_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("certify", "no-such-model") == 2
    assert "Unknown model 'no-such-model'" in capsys.readouterr().err
