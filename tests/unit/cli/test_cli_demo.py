import json
from collections.abc import Iterator

import pytest

from tests.unit.fake_api import FakeApi, serving_fake_api
from vectormill import corpus
from vectormill.cli.app import main
from vectormill.corpus import Docstring

TEXTS = [Docstring("json.loads", "Parse JSON.\n\nMore."), Docstring("os.fork", "Fork.")]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    monkeypatch.setattr(corpus, "read_docstrings", lambda: iter(TEXTS))
    with serving_fake_api() as fake:
        yield fake


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_the_demo_ends_with_figures_reasons_and_three_searches(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("demo", "--api-url", api.url) == 0
    # Columns are padded: compared as words.
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "items 2" in lines
    assert "seconds 5.0 from the submission to the last commit" in lines
    assert "padding waste 12.5% share of the computed tokens that were padding" in lines
    assert "bound by run the model: the device was computing in 90% of the time" in lines
    assert "model mini the default" in lines
    assert "backend openvino the faster backend on CPUs" in lines
    assert "Nearest to: how to parse a date" in lines
    assert lines.count("0.500 json.loads Parse JSON.") == 3
    assert lines[-1] == "2 of 2 texts have their vector."
    assert api.jobs["job-1"]["collection"] == "docstrings"


def test_the_demo_prints_json_for_machines(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--api-url", api.url, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_vectors"] == 2
    assert report["summary"]["device"] == {"value": "cpu:0", "reason": "there is no accelerator"}
    assert len(report["searches"]) == 3


def test_the_demo_counts_the_vectors_instead_of_trusting_the_state(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.missing_vectors = {"os.fork"}
    assert run("demo", "--api-url", api.url) == 1
    assert "1 of 2 texts have no vector" in capsys.readouterr().err


def test_a_demo_whose_job_fails_says_so_without_searching(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    api.final_state = "failed"
    api.missing_vectors = {"json.loads", "os.fork"}
    assert run("demo", "--api-url", api.url) == 4
    assert "job job-1 failed" in capsys.readouterr().err
    assert not [path for _, path, _ in api.requests if "search" in path]
