"""The command line, as a person types it."""

import json
from pathlib import Path

import pytest

from tests.blackbox.service import DIMENSIONS, MODEL, Service


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"key": f"k{n}", "text": f"Text {n}."}) + "\n" for n in range(30)))
    return source


@pytest.mark.parametrize("form", ["jsonl", "parquet", "npy"])
def test_encode_writes_a_file_of_vectors(service: Service, texts: Path, tmp_path: Path, form: str) -> None:
    target = tmp_path / f"vectors.{form}"
    service.run("encode", str(texts), "-o", str(target))
    if form == "jsonl":
        lines = [json.loads(line) for line in target.read_text().splitlines()]
        assert [line["key"] for line in lines] == [f"k{n}" for n in range(30)]
        assert {len(line["embedding"]) for line in lines} == {DIMENSIONS}
    elif form == "npy":
        assert list(map(json.loads, (tmp_path / "vectors.npy.keys.txt").read_text().split())) == [
            f"k{n}" for n in range(30)
        ]
    else:
        assert target.read_bytes()[:4] == b"PAR1"


def test_a_job_is_submitted_followed_exported_and_deleted(
    service: Service, texts: Path, tmp_path: Path
) -> None:
    job = (
        service.run("submit", str(texts), "--collection", "typed").stdout.strip().splitlines()[-1].split()[-1]
    )
    assert service.run("status", job, "--watch").returncode == 0
    state = json.loads(service.run("status", job, "--json").stdout)
    assert (state["state"], state["num_done"]) == ("completed", 30)
    assert job in service.run("jobs", "--json").stdout
    service.run("export", job, "-o", str(tmp_path / "out.jsonl"))
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 30
    assert "k7" in service.run("search", "typed", "Text 7.", "--limit", "3").stdout
    assert "typed" in service.run("collections", "list").stdout
    service.run("delete", job)
    assert service.run("status", job, check=False).returncode == 2


def test_items_are_put_printed_and_deleted(service: Service, name: str) -> None:
    service.run("collections", "create", name, "--model", MODEL)
    service.run("items", "put", name, "readme", "How to begin.")
    assert json.loads(service.run("items", "get", name, "readme").stdout)["key"] == "readme"
    service.run("items", "delete", name, "readme")
    assert service.run("items", "get", name, "readme", check=False).returncode != 0


def test_a_mistake_ends_with_a_sentence_and_not_with_a_traceback(service: Service, tmp_path: Path) -> None:
    for arguments in (
        ["encode", str(tmp_path / "missing.jsonl"), "-o", str(tmp_path / "out.npy")],
        ["status", "nope"],
        ["submit", str(tmp_path), "--model", "no-such-model"],
        ["search", "no-such-collection", "x"],
        ["jobs", "--api-url", "http://127.0.0.1:9"],
    ):
        done = service.run(*arguments, check=False)
        assert done.returncode in (2, 3), arguments
        assert "Traceback" not in done.stderr
        assert done.stderr.strip()


def test_workers_models_plan_and_doctor_answer(service: Service) -> None:
    assert MODEL in service.run("workers").stdout
    assert MODEL in service.run("models").stdout
    assert service.run("plan", "--model", MODEL).stdout
    assert service.run("doctor", check=False).stdout
    assert "vectormill" in service.run("--version").stdout.lower()
